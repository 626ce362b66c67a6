"""Evidence about attention residuals: plain residual, full, block and a simple bypass, at equal compute.

From the root of the repository, with the package (and, for `page`, plotly: `pip install '.[report]'`):

    python -m experiments.depth small page                       two cores: about ten minutes
    python -m experiments.depth bank                             finished blocks in less memory: ten minutes
    python -m experiments.depth full page --device cuda:0        one H200: a narrow model of 100 sublayers, and `small`

Each word is a part; runs that are finished are not done again.  With `--minutes M` a part ends by itself in time, and
the same command later does what is left.  `page` writes what all parts that are there have found to
`benchmarks/results/depth.json`, its pictures to `docs/images` and its tables into `docs/depth-evidence.md`.
"""
