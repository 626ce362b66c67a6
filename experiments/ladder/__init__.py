"""Evidence about the climb to long contexts: stages against a jump, re-warmed rates against none, two gates.

From the root of the repository, with the package (and, for `page`, plotly: `pip install '.[report]'`):

    python -m experiments.ladder small page --seeds 1            two cores: about ten minutes a seed
    python -m experiments.ladder full page --device cuda:0       one GPU: contexts of 512 to 65,536, asked up to 262,144

Each word is a part; runs that are finished are not done again.  With `--minutes M` a part ends by itself in time, and
the same command later does what is left.  `page` writes what all parts that are there have found to
`benchmarks/results/ladder.json`, its pictures to `docs/images` and its tables into `docs/ladder-evidence.md`.
"""
