"""Evidence about expert balancing: every rule on the same model, text and seeds, and a map of where each wins.

From the root of the repository, with the package and plotly installed (`pip install '.[report]'`):

    python -m experiments.balancing map small page     a two-core machine: minutes each
    python -m experiments.balancing full wide page     a GPU: 896 experts; 512 experts at the `1b` preset's width

Each word is a part; parts that were done are not done again, broken ones are gone on with.  `page` writes what all
parts that are there have found to `benchmarks/results/balancing.json`, its pictures to `docs/images` and its tables
into `docs/balancing-evidence.md`.
"""
