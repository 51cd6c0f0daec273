"""`torch_logits.py FOLDER TOKENS.npy LOGITS.npy`, run by a Python with torch and transformers, saves a Hugging Face model's logits."""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

folder, tokens, logits = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad():
    np.save(logits, model(torch.from_numpy(np.load(tokens))).logits.numpy())
