"""Measuring beside the attention libraries found here (layer 5): kernel time and host time, apart.

``cells`` says what is measured, ``peers`` and ``own`` by whom, ``agreement`` that all compute the same, ``passes``
which part of it is timed, ``machine`` how long it takes; ``session`` does it all, ``rows`` is the result and its file,
``summary``, ``report`` and ``plot`` show it. Reading and showing rows needs no GPU and no torch.
"""
