"""Command-line options that several commands share: one name and one help text each."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Hub id, Hugging Face folder, GGUF file, or shape:NAME for random weights.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda if available.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; by default bfloat16 on CUDA, else float32.")
]
Residual = Annotated[str | None, typer.Option(help="float32 keeps the residual stream of a 16-bit model in float32.")]
KVDtype = Annotated[str | None, typer.Option(help="int8 or fp8 stores KV in 8 bits; by default the model's dtype.")]
KVMemory = Annotated[str | None, typer.Option(help="Size of the KV pool, such as 20GiB; by default it fits the rows.")]
MaxRows = Annotated[int, typer.Option(help="Maximum number of sequences that decode together.")]
Page = Annotated[int, typer.Option(help="KV tokens per page; a selector's block size takes precedence.")]
Prompts = Annotated[
    list[str],
    typer.Option(
        "--data", help="Prompts: a benchmark, hub id, JSONL or Parquet file, folder, or task:NAME; repeatable."
    ),
]
Split = Annotated[str | None, typer.Option(help="Split of a Hugging Face data set.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with local copies of the benchmarks.")]
PromptTemplate = Annotated[str | None, typer.Option(help="Prompt template, with {field}s of the row.")]
Chat = Annotated[bool | None, typer.Option(help="Use the chat template; by default if the model has one.")]
TaskOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Option of a generated task, such as symbols=4; repeatable."),
]
Sparsity = Annotated[str, typer.Option(help="dense, rkv:512+128, block-topk:1024, ...")]
Sparsities = Annotated[
    list[str] | None, typer.Option(help="dense (the default), rkv:512+128, block-topk:1024, ...; repeatable.")
]
SparseAdapter = Annotated[
    Path | None, typer.Option(help="Folder with the adapter of the sparse policy (DistillSparse).")
]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
