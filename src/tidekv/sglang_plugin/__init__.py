"""tidekv inside SGLang: a plugin that replaces the paged allocator, the MHA pool and the attention backend of a server.

    TIDEKV_SGLANG=1 python -m sglang.launch_server ... --page-size 16

    plugin.py         the entry point: which hooks, and the refusal to start if one did not take
    seams.py          every place of SGLang that is touched, with its signature and the versions it was read in
    refusals.py       what this plugin cannot serve, as messages that name the flag
    build.py          sizes, pool and allocator, made in the places of SGLang's
    hooks.py          what SGLang calls while it runs
    allocator.py      SGLang's allocator contract in virtual page ids, over the core's allocator
    pressed_pages.py  what gives way when physical pages are short; freeing.py: frees on their way from the device
    virtual_pages.py  virtual page id -> slot: the one table that a repack rewrites
    capacity.py       how many virtual pages so many physical ones can carry
    window.py         which pages a lossy window does not see
    pausing.py        who decodes and who pauses: pure functions of counts
    paused_batch.py   paused requests inside SGLang's scheduler: out of the running batch, narrow, and back
    request_pages.py  the pages of requests, narrower and wider; split_batch.py: one batch in two, and together again
    page_mirror.py    which virtual pages each row names, on the host
    pool.py           SGLang's per-layer buffers as views of the core's flat tensors
    batch_plan.py     from SGLang's forward batch to the core's packed batch
    attention.py      what stands before SGLang's attention backends: the core's attention where a batch is narrowed
    backends.py       those backends, and how each is told where moved pages lie
    graphs.py         narrowed decode steps replayed; forward_hooks.py: where a forward is planned
    metrics.py        tidekv:... beside sglang:..., and the log lines

Importing this package imports nothing of SGLang; modules that do are imported by `plugin.install`.
"""
