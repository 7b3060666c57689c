"""`ds4jax serve`: the server, which speaks the OpenAI and Anthropic APIs."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ds4jax.config import EngineConfig, KVPolicy, ServerConfig


def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Option("-m", "--model", help="Weights (an existing GGUF file), or the name to serve under.")] = None,
    model_path: Annotated[Path | None, typer.Option(help="Weights, where --model is a name. Default: the small model.")] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="A further name; may be repeated.")] = None,
    strict_model: Annotated[bool, typer.Option("--strict-model", help="Answer 404 to requests for any other model name.")] = False,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT, in place of --host and --port.")] = None,
    host: Annotated[str | None, typer.Option(help=f"Default {ServerConfig.host}: this machine alone.")] = None,
    port: Annotated[int | None, typer.Option(help=f"Default {ServerConfig.port}; 0 takes any free port.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="A key that requests must carry; may be repeated.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Such keys, one a line; others cannot read them off the process list.")] = None,
    cors: Annotated[bool, typer.Option("--cors", help="Let web pages of other origins use the server.")] = False,
    batched_session: Annotated[int, typer.Option(min=1, help="Slots: sessions that decode together.")] = EngineConfig.slots,
    ctx: Annotated[int, typer.Option("-c", "--ctx", min=2, help="Context of each slot, in tokens.")] = EngineConfig.ctx,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="Longest answer where a request names none.")] = (
        ServerConfig.default_max_tokens
    ),
    queue_limit: Annotated[int | None, typer.Option(min=0, help="Requests that may wait for a slot. Default: 4 a slot.")] = None,
    snapshots: Annotated[int | None, typer.Option(min=0, help="States kept to return to. Default: 4 a slot.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(min=1, help="Prompt tokens a step takes while nobody decodes.")] = None,
    prompt_style: Annotated[str, typer.Option(help="deepseek or ds4: where consecutive user turns are joined.")] = (
        ServerConfig.prompt_style
    ),
    tool_prompt: Annotated[Path | None, typer.Option(help="A text that tells the model of tools, in place of ours.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="A Jinja file that makes prompts; gguf: that of the weights.")] = None,
    tool_memory_max_ids: Annotated[int, typer.Option(min=0, help="Tool calls whose very text is kept for the next prompt.")] = (
        ServerConfig.tool_memory_max_ids
    ),
    no_replay: Annotated[bool, typer.Option("--disable-exact-dsml-tool-replay", help="Keep none: write calls anew.")] = False,
    kv_disk_dir: Annotated[Path | None, typer.Option(help="A folder in which sessions outlive their slots and the server.")] = None,
    kv_disk_space_mb: Annotated[int, typer.Option(help="Most that they take, MiB.")] = KVPolicy.space_mb,
    kv_cache_min_tokens: Annotated[int, typer.Option(help="Shorter sessions are not kept there.")] = KVPolicy.min_tokens,
    kv_cache_cold_max_tokens: Annotated[int, typer.Option(help="Longest prompt of which the beginning is kept; 0: none.")] = (
        KVPolicy.cold_max_tokens
    ),
    kv_cache_continued_interval_tokens: Annotated[int, typer.Option(help="Tokens between two saves of a session; 0: none.")] = (
        KVPolicy.continued_interval_tokens
    ),
    kv_cache_boundary_trim_tokens: Annotated[int, typer.Option(help="Of a prompt's end, not kept as its beginning.")] = (
        KVPolicy.boundary_trim_tokens
    ),
    kv_cache_boundary_align_tokens: Annotated[int, typer.Option(help="Beginnings are cut to a multiple of it.")] = (
        KVPolicy.boundary_align_tokens
    ),
    trace: Annotated[Path | None, typer.Option(help="Empty this file, then add every request: prompts, raw replies, times.")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Short for --backend cpu.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="Short for --backend cuda.")] = False,
    gpu: Annotated[str | None, typer.Option("--gpu", "--gpu-devices", help="Id of the GPU to use.")] = None,
    kv_quant: Annotated[str, typer.Option(help="none, ds4 or auto: whether the cache is rounded as in ds4.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto: activations.")] = "auto",
    chdir: Annotated[Path | None, typer.Option(help="Change to this folder first.")] = None,
    random: Annotated[str | None, typer.Option(hidden=True, help="Random weights, as for bench serve.")] = None,
    layers: Annotated[int | None, typer.Option(hidden=True, help="Only the first so many layers of --random.")] = None,
) -> None:
    """Serve a model over HTTP. ds4-server's own flags are accepted too; those without effect here say so."""
    from ds4jax.cli import console
    from ds4jax.cli.ds4_flags import take_ds4_flags
    from ds4jax.cli.loading import KVDisk, Numerics, open_engine
    from ds4jax.cli.options import (
        choose_backend,
        choose_model,
        engine_config,
        parse_address,
        read_api_keys,
        read_chat_template,
        read_tool_prompt,
        start_trace,
    )
    from ds4jax.serving.http.serve import reserve, run
    from ds4jax.serving.http.waiting import waiting_room
    from ds4jax.text.dsml import ReplayMemory

    take_ds4_flags(context.args, console.warn)
    if chdir is not None:
        change_directory(chdir)
    choice = choose_model(model, model_path, served_model_name or [])
    address, port_number = parse_address(listen, host, port)
    engine_settings = engine_config(
        os.environ, console.warn, slots=batched_session, ctx=ctx, queue_limit=queue_limit, snapshots=snapshots, prefill_chunk=prefill_chunk
    )
    server_settings = ServerConfig(
        host=address, port=port_number, model_id=choice.model_id, aliases=choice.aliases, strict_model=strict_model,
        default_max_tokens=tokens, cors=cors, prompt_style=prompt_style, api_keys=read_api_keys(api_key or [], api_key_file),
        tool_memory_max_ids=0 if no_replay else tool_memory_max_ids, trace=start_trace(trace),
        tool_prompt=read_tool_prompt(tool_prompt), chat_template=read_chat_template(chat_template, lambda: template_of(choice.path)),
    )  # fmt: skip
    kv_policy = KVPolicy(
        kv_disk_space_mb, kv_cache_min_tokens, kv_cache_cold_max_tokens, kv_cache_continued_interval_tokens,
        kv_cache_boundary_trim_tokens, kv_cache_boundary_align_tokens,
    )  # fmt: skip
    if kv_disk_dir is None and kv_policy != KVPolicy():
        console.warn("the --kv-cache-* options and --kv-disk-space-mb have no effect without --kv-disk-dir")
    memory = ReplayMemory(server_settings.tool_memory_max_ids)
    disk = KVDisk(kv_disk_dir.absolute(), kv_policy, memory) if kv_disk_dir is not None else None
    numerics = Numerics(kv_quant, dtype)
    wanted, gpu_id = choose_backend(backend, cpu, cuda, gpu)

    console.log_to_stderr()
    is_early = random is None  # whoever measures random weights waits for every batch size
    opening = open_engine(choice.path, engine_settings, wanted, gpu_id, numerics, early=is_early, random=random, layers=layers, disk=disk)
    with reserve(address, port_number) as reserved, ExitStack() as stack:
        with waiting_room(reserved):
            engine, tokenizer = stack.enter_context(opening)
        run(engine, tokenizer, server_settings, memory=memory, reserved=reserved, on_ready=lambda url: announce(url, server_settings))
        compiling = engine.compiling
    if compiling:
        # A compilation cannot be interrupted, and an orderly exit would wait for it; nothing else is left to do or to save.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def template_of(path: Path | None) -> object:
    """The chat template that weights bring along; None if they bring none."""
    from ds4jax.cli.loading import choose_path
    from ds4jax.model.gguf.reader import GGUFFile

    return GGUFFile(choose_path(path)).metadata.get("tokenizer.chat_template")


def announce(url: str, settings: ServerConfig) -> None:
    """Print the address, and a request that can be pasted into another terminal. Keys stay where they are: terminals are shown around."""
    from ds4jax.cli.console import note

    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    body = f'{{"model": "{settings.model_id}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 64, "thinking": false}}'
    note(
        f"serving {settings.model_id} at {url}\ntry:\n  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )


def change_directory(folder: Path) -> None:
    """Change the working directory. Raises ConfigError if it does not exist."""
    from ds4jax.errors import ConfigError

    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(f"--chdir {folder}: {error.strerror}; name an existing folder") from error
