"""``lrmoe train``: a Mixture-of-Experts training job on Hugging Face's ``Trainer``.

Read ``job.py`` first: it is the run from settings to summary.
"""
