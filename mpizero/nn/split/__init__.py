"""Split layers over a tensor group: every rank holds and computes a part.

Each one is made of the unsplit layer it stands for (``whole``) and the group; the unsplit layers make them, by
:meth:`mpizero.nn.Layer.split`.
"""
