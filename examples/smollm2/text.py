"""Training text that the model writes by itself: questions and its answers to them."""

from __future__ import annotations

import argparse
import random
import re
import time

import torch
from llama import Llama
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END, CONTROL = 2, 17  # <|im_end|>, and the number of control tokens, which have the first ids
LENGTH = 304  # tokens of a row
QUESTION = 48  # tokens after which a sampled question is cut
BEST = 128  # likeliest tokens from which one is sampled
# The first words of questions. The model writes the rest.
OPENINGS = """What is|What are|What does|What's the best way to|What causes|What happens when|How do|
How does|How can I|How would you|How many|How long|Why do|Why is|Why are|Who was|Who|When did|Where|
Which|Is it|Are there|Can you|Could you|Do you|Should I|Explain|Explain why|
Explain the difference between|Describe|Describe how|Define|Compare|List|List five|Name|
Give me an example of|Give me a recipe for|Suggest|Recommend|Write a short story about|
Write a poem about|Write an email to|Write a letter|Write a paragraph about|
Write a Python function that|Write a Python program|Write code to|Write a SQL query|
Write a JavaScript function|Write a C program|Write a slogan for|Write a product description|
Write a dialogue between|Write a summary of|Summarize|Translate|Rewrite|Correct the grammar|Solve|
Calculate|Convert|Classify|Tell me about|Tell me a joke about|Tell me a story|Help me|Help me plan|
I want to|I need|I have|I am writing|I'm trying to|My|If|In the|Imagine|Create|Create a list of|Design|
Plan|Make a|Generate|Identify|Discuss|Outline|Analyze|Provide|Provide a step-by-step guide to|
Consider|Let's|Hi|Hello|Please|As a|Using|Based on|For|The|A|You are|Here is|Given"""
TOPICS = """history|physics|chemistry|biology|the ocean|weather|space|planets|music|painting|cooking|
bread|coffee|gardening|trees|birds|dogs|cats|insects|health|sleep|exercise|medicine|money|taxes|
business|marketing|a job interview|a meeting|school|teachers|mathematics|fractions|geometry|statistics|
probability|computers|Python|Java|HTML|databases|sorting|strings|networks|security|machine learning|
robots|cars|bicycles|trains|travel|Japan|Africa|Europe|India|cities|law|politics|war|peace|religion|
philosophy|ethics|friendship|family|children|love|books|poetry|movies|games|chess|football|fashion|
architecture|energy|climate|water|recycling|farming|food|animals|plants|rocks|light|sound|electricity|
engines|tools|writing|grammar|stories|a dragon|a detective|a robot|a village|winter|summer|the moon|
the brain|the heart|DNA|stress|time management"""
# Text about the three prompts with which drafts are measured is dropped.
EXCLUDED = re.compile(
    r"rainbow|revers\w* .*list|list.*revers|learn\w* .*language|language.*learn", re.IGNORECASE
)


def _opening(rng: random.Random) -> str:
    words, about = (rng.choice(x.replace("\n", "").split("|")) for x in (OPENINGS, TOPICS))
    return rng.choice((words, f"{words} {about}", f"About {about}: {words}"))


@torch.no_grad()
def sample(llama: Llama, tokenizer: Tokenizer, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Let the model write ``batch`` conversations.

    Returns the tokens, and 1 for the tokens of answers, both int32 ``[batch, LENGTH]``. After an
    answer, a row goes on with another question. The answers of even rows are greedy. Those of odd
    rows have temperature 0.7. Questions have temperature 1 and top-p 0.95.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text).ids
        return found

    system, user = ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"), ids("<|im_start|>user\n")
    assistant = ids("\n<|im_start|>assistant\n")
    given = [system + user + ids(_opening(rng)) for _ in range(batch)]  # the next tokens of a row
    asking, asked = [True] * batch, [0] * batch
    temperatures = torch.ones(batch, 1)
    tokens, answers = torch.zeros(2, batch, LENGTH, dtype=torch.int32)
    shape = (len(llama.layers), 2, batch, llama.kv_heads, LENGTH, llama.head_size)
    cache = torch.zeros(shape, dtype=torch.bfloat16)
    chosen = torch.zeros(batch, dtype=torch.long)
    for t in range(LENGTH):
        for row in range(batch):
            token = int(chosen[row])
            if given[row]:
                token = given[row].pop(0)
            elif asking[row]:
                asked[row] += 1
                if token == END or asked[row] == QUESTION:
                    token, given[row], asking[row] = END, list(assistant), False
                    temperatures[row] = 0.7 * (row % 2)
            else:
                answers[row, t] = 1
                if token == END:
                    given[row], asking[row] = ids("\n") + user + ids(_opening(rng)), True
                    asked[row], temperatures[row] = 0, 1
            tokens[row, t] = token

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor, t: int = t) -> Tensor:
            cache[i, 0, :, :, t], cache[i, 1, :, :, t] = k[:, :, 0], v[:, :, 0]
            # The query heads that share keys become the rows of one product.
            grouped = q.reshape(batch, llama.kv_heads, -1, llama.head_size)
            found = F.scaled_dot_product_attention(grouped, *cache[i, :, :, :, : t + 1])
            return found.view(q.shape)

        states = llama.states(tokens[:, t : t + 1].long(), torch.tensor([t]), attend)[:, 0]
        logits = F.linear(states, llama.embedding)
        questions = torch.tensor(asking)
        logits[questions, :END] = logits[questions, END + 1 : CONTROL] = -1e9
        found = logits.topk(BEST).indices
        # Many logits are equal in bf16. The greedy token must be the one of fp32.
        p = (llama.embedding[found].float() @ states.float()[:, :, None])[:, :, 0]
        p = (p / temperatures.clamp(min=1e-5)).softmax(-1)
        p, order = p.sort(descending=True)
        p[p.cumsum(-1) - p > torch.where(temperatures == 1, 0.95, 1.0)] = 0
        chosen = found.gather(1, order.gather(1, p.multinomial(1, generator=generator)))[:, 0]
    return tokens, answers


def sample_text(arguments: argparse.Namespace) -> None:
    """Sample batches of conversations and write all of them to a file after each batch."""
    llama = Llama(arguments.checkpoint)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    start, batches = time.monotonic(), []
    while not batches or time.monotonic() < start + 60 * arguments.minutes:
        seed = 1000 * arguments.seed + len(batches)
        tokens, answers = sample(llama, tokenizer, arguments.batch, seed)
        texts = tokenizer.decode_batch(tokens.tolist(), skip_special_tokens=False)
        kept = torch.tensor([not EXCLUDED.search(text) for text in texts])
        greedy = torch.arange(arguments.batch) % 2 == 0
        batches.append((tokens[kept], answers[kept], greedy[kept]))
        found = [torch.cat(x) for x in zip(*batches, strict=True)]
        save_file(dict(zip(("tokens", "answers", "greedy"), found, strict=True)), arguments.text)
        minutes = (time.monotonic() - start) / 60
        count = int(found[1].sum())
        print(
            f"{minutes:.1f} min: {len(found[0])} conversations, {count} tokens of answers",
            flush=True,
        )
