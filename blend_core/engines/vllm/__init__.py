"""The vLLM engine: vLLM's models, kernels and features, its requests admitted by our policy.

Importing this package, `options` and `installed` loads no vLLM. The parts, from the outside in:

    options.py, passed_options.py   what an engine is opened with; which of vLLM's options pass through
    adapter_folders.py              folders of LoRA adapters, checked before vLLM reads them
    model_fit.py                    `max_model_len` and `tensor_parallel_size`, held against the model
    error_words.py                  vLLM's own words for what is wrong
    core_log.py                     what ended a process of vLLM's own, which tells only that it ended
    installed.py                    which vLLM is there, for which device, without loading it
    factory.py                      makes the engine in its process
    engine.py                       `Engine`: opens vLLM, runs sources on it
    run.py                          one run: feeds vLLM, turns outputs into events
    request_window.py               the bounded window of the job that vLLM holds
    requests.py                     a request as vLLM takes it, and why one can never run
    core.py                         vLLM's core in this process or in one of its own, as a run drives it
    control.py, remote_control.py   what a run asks of the scheduler, here or across processes
    reports.py, admission_log.py    what the scheduler tells a run, in messages and in shared memory
    scheduler.py                    vLLM's scheduler with our queue: the class that is named to vLLM
    admission_queue.py              vLLM's queue of waiting requests, in the policy's order, with its gate
    waiting_requests.py             what waits, what of it could start, and what is cached of it
    scheduler_view.py               what queue and scheduler know of one another
    flight.py                       what is in flight, and what a step did
    cpu_worker.py                   vLLM's worker for CPUs around a fault of its own with seeds
"""
