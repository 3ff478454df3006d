"""Define the split (tensor-parallel) forms of layers: each rank of a tensor group holds and computes a part of a layer.

A split form has two fields: the unsplit layer (``whole``) and the tensor group (``group``). The method
:meth:`mpizero.nn.Layer.split` of the unsplit layer makes it.
"""
