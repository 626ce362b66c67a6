"""Continue a prompt with a trained model."""

import argparse
from pathlib import Path

from perilune.cli.folders import load_model
from perilune.cli.numbers import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run (runs/demo) or a model folder")
    parser.add_argument("--prompt", default="", help="the text to continue; nothing starts a new document")
    parser.add_argument("--tokens", type=at_least(0), default=200, help="new tokens at most (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="draw among the likeliest up to this probability (0.95)"
    )
    parser.add_argument("--top-k", type=at_least(0), default=0, help="draw among the k likeliest; 0 is all (0)")
    parser.add_argument("--seed", type=at_least(0), default=None, help="for the same text every time")


def run(args: argparse.Namespace) -> int:
    from perilune.infer.sampler import Sampling
    from perilune.infer.text import stream_text

    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    model, tokenizer = load_model(args.folder)
    tokenizer.encode(args.prompt)  # refuses what is no text before any of it is printed
    print(args.prompt, end="", flush=True)
    for piece in stream_text(model, tokenizer, args.prompt, args.tokens, sampling=sampling, seed=args.seed):
        print(piece, end="", flush=True)
    print()
    return 0
