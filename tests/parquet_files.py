"""Parquet files of pictures, as the Hugging Face hub stores data sets of images."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image


def encode(image: np.ndarray) -> dict:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


def write(path: Path, images: np.ndarray, labels: list, names: list[str] | None = None, **columns) -> Path:
    table = pyarrow.table({"img": [encode(x) for x in images], "label": labels} | columns)
    if names is not None:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(table, path)
    return path
