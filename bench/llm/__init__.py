"""Language models in relaxlite, llama.cpp and transformers: the same weights, the same tokens, the same threads.

    python -m bench.llm                                     smollm2 and llama-1.1b, on a machine that does nothing else
    python -m bench.llm --model smollm2 --only prompt --processes 2
    python -m bench.llm --model llama-tiny --quick          a minute: that everything runs
    python -m bench.llm --model mixture-1.3b                random weights in 24 layers of 32 experts, 8 for each token
    python -m bench.llm --model some.gguf --llama-python llama-env/bin/python

What is measured
    prompt      tokens per second of a prompt, from an empty cache to the likeliest next token
    generate    tokens per second of a reply of 64 tokens to a context, the likeliest token each time
    batch       the same of several sequences side by side, tokens of all together
    Also seconds to load (files in the page cache, imports apart) and to the first token, the process's peak memory,
    sizes of files, and how far logits differ. Tokens are random, as llama-bench takes them; nothing ends a reply early.

How it measures
    Every peer runs in a process of its own (worker.py), one after the other, five times each, in an order that turns.
    A process opens the model, runs each case once or more to warm up, then times it; what counts is the median of the
    processes' medians. In between, the processor's plain read bandwidth is measured (bench/cpu/machine.py) over as many
    bytes as one generated token has to read: the share of it that generation reaches is the share of what is possible.
    relaxlite reads what `relaxlite compile` wrote. llama.cpp (llama-cpp-python) is called through llama_decode, memory
    mapped, with and without flash attention, and goals count against the better one. transformers computes in float32.
    Threads of llama.cpp spin while they wait: beside other work on the same cores its figures are worth nothing.

Where things stand
    models.py     what is measured on: names, GGUF files, the bytes that a token reads
    random_gguf.py    writes GGUF files of random weights
    cases.py      the cases
    peers.py      what a peer does, and relaxlite; llama_peer.py, transformers_peer.py: the others
    worker.py     a peer's process
    measure.py    the rounds
    goals.py      what is to be reached, and whether it is
    report.py     JSON, Markdown and a plot
"""
