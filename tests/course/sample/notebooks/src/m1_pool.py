# %% [markdown]
# # A pool

# %%
from milestones import notebooks

notebooks.running("m1")

# %%
from folovllm import pool

pool.Pool(3).take()
