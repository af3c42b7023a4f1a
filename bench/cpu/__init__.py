"""relaxlite and its peers on one processor, in turn, on the same inputs and the same number of threads.

    python -m bench.cpu                                     everything; half an hour on two cores
    python -m bench.cpu --only minilm,matmul --rounds 3     some groups
    python -m bench.cpu --quick --output results            a few sizes of each group

How it measures
    Every peer lives in a process of its own (worker.py) that opens a model once and runs it when told to. Turns go
    round robin over the peers, for several rounds, so that a slow minute of a shared machine meets everyone. A turn
    ends when the peer's threads have stopped spinning, so that nobody runs beside another's idle pool.
    The peer "machine" (machine.py) is one of them: it measures, in the same rounds, how long the processor needs for
    the same arithmetic or memory traffic and nothing else. Shares of the peak are ratios against it.
    Outputs are compared with those of onnxruntime before anything is timed.

Where things stand
    cases.py      what is measured: groups of ONNX models, each with inputs of several sizes
    onnx_models.py    makes the small ones
    peers.py      how relaxlite, onnxruntime, OpenVINO, TVM and NumPy open and run a model
    torch_peers.py    PyTorch's ways
    machine.py    the processor as a peer
    measure.py    the rounds, and the sweep over shapes that nobody has seen before
    goals.py      what is to be reached, as ratios, and whether it is
    report.py     JSON, Markdown and a plot
"""
