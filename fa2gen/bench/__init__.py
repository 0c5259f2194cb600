"""Measuring beside the attention libraries found here (layer 5): kernel time and host time, apart.

``cells`` says what is measured, ``peers`` against whom, ``agreement`` that all compute the same, ``kernel_time`` and
``host_time`` how long they take; ``session`` does it all, ``rows`` is the result and its file, ``summary``, ``report``
and ``plot`` show it. Reading and showing rows needs no GPU and no torch.
"""
