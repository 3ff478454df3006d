"""Train a small GPT with parameters, gradients and optimizer state sharded over all ranks.

Run it as ``mpiexec -n 8 python scripts/train.py``, with any number of ranks: the printed hash of the parameters does
not depend on that number.
"""

from __future__ import annotations

import argparse

import mpizero as mz


def main() -> None:
    """Train, print losses and the hash of the parameters, and save the model if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", nargs="+", default="stdlib", help="text files, or the Python standard library")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step, over all ranks")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", default="", help="folder for the trained model")
    args = parser.parse_args()

    source = mz.data.TextSource(args.text, sequence=64)
    gpt = mz.nn.GPT(dim=args.dim, layers=2, heads=4, sequence=64)
    with mz.distribute(gpt, mz.AdamW(lr=args.lr), "fsdp", config=mz.Config(micro_batch=2)) as model:
        for x, y in mz.data.batches(source, model, global_batch=args.batch, seed=0, steps=args.steps):
            loss = model.train(x, y)  # forward, backward, exact sum over ranks, sharded update
            if model.rank == 0 and model.optimizer.step_count % 10 == 0:
                print(f"step {model.optimizer.step_count}: loss {loss:.4f}", flush=True)
        digest = model.parameters_sha256()
        if model.rank == 0:
            print(f"{model.parameter_count} parameters on {model.world_size} ranks, sha256 {digest}")
        if args.save:
            model.save_model(args.save)


if __name__ == "__main__":
    main()
