"""What somebody who comes from `transformers` writes first. Arguments: MODEL FILE."""

import asyncio
import sys
from pathlib import Path

import minitri

model, file = sys.argv[1:]
with minitri.load(model) as engine:
    # Streaming.
    for event in engine.generate("The sea was", max_new_tokens=20, temperature=0.7, top_p=0.9):
        if isinstance(event, minitri.Token):
            print(event.text, end="", flush=True)

    # A batch, with the log-probability of each token.
    run = engine.generate(["One", "Two", "Three"], max_new_tokens=8, logprobs=2, seed=1)
    for done in run.results():
        print(repr(done.text), done.seed, [token.logprob for token in done.tokens])

    # A chat of two turns, and how likely the model finds a text.
    messages = [{"role": "user", "content": "Why is the sea salty?"}]
    answer = engine.chat(messages, max_new_tokens=24, temperature=0.7).result()
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "So?"}]
    print(engine.chat(messages, max_new_tokens=24, temperature=0.7).result())
    print("perplexity", (-engine.score("The sea is salt.").mean()).exp())

    # One document, which is read once, and three questions.
    document = Path(file).read_text()
    for question in ("Who is it about?", "Where are they?", "What happens?"):
        done = engine.complete(f"{document}\nQ: {question}\nA:", max_new_tokens=12, stop=["\n"])
        print(question, done.row_stats.num_cached_tokens, "tokens were known;", repr(done.text))

    # What a web handler does: requests that come at once share a batch.
    async def handle(question):
        pieces = []
        async for event in engine.achat(question, max_new_tokens=12, temperature=0.7):
            if isinstance(event, minitri.Token):
                pieces.append(event.text)
        return "".join(pieces)

    async def main():
        print(await asyncio.gather(*map(handle, ("Who are you?", "Count to ten.", "Say hello."))))

    asyncio.run(main())
