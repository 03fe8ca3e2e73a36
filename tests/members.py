"""What the processes of a `Job` run: one member of a job of several.

`python members.py SETTINGS` joins the job and then does what its standard input tells
it, a JSON document a line; on its standard output it answers the same way. It ends when
its parent does. Does not belong here: judging, and imports that are slow before they
are needed.
"""

import contextlib
import errno
import faulthandler
import functools
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import children
import numpy as np
from job_states import content, described, state, target

OPTIONS = {
    "chunk_bytes": 512,
    "pack_bytes": 4096,
    "full_every": 3,
    "refresh_every": 6,
    "threads": 1,
}
"""Options under which a small state has many chunks, packs and turns."""


def orbax_delta():
    """The package, once it is needed."""
    import orbax_delta

    return orbax_delta


def testing():
    """Its faults, once they are needed."""
    import orbax_delta.testing

    return orbax_delta.testing


# --- what goes wrong ------------------------------------------------------------------


def edited(tree, edit):
    """The state with what one process, or all, may have wrong about it."""
    if edit == "odd leaf":
        return {**tree, "odd": object()}
    if edit == "extra leaf":
        return {**tree, "extra": 1}
    if edit == "other dtype":
        return {**tree, "host": tree["host"].astype(np.float32)}
    if edit == "other values":
        return {**tree, "host": tree["host"] + 1, "step": -1, "name": "another"}
    assert edit is None, edit
    return tree


def broken(member, rule, **match):
    """A fault rule for the store of this process.

    `fail`: the operation fails. `hold`: it waits until the parent says `release`, and
    `hold after` until then before its caller goes on. `late`: it fails, but takes
    effect when the next one like it begins. `stale`: listings show nothing new.
    """
    if rule == "stale":
        return testing().stale_listing(0, **match)
    matching = testing().Match(**match)
    if rule == "fail":
        return testing().fail(errno.EIO, matching)
    if rule == "hold":
        return testing().delay(lambda _: member.hold(), matching)
    acts = {"hold after": functools.partial(hold_after, member), "late": Late()}
    return testing().Rule(matching, lambda: acts[rule])


def hold_after(member, call, proceed):
    """An operation takes effect, and then its caller has to wait."""
    result = testing().Done(proceed(call).result())
    member.hold()
    return result


@contextlib.contextmanager
def watched_decision(member, how):
    """No rule for stores can come between a process and its verdict; this does."""
    from orbax_delta.hosts import Round

    real = Round._decide

    def decide(round_, wanted):
        if how == "wait":
            member.hold()
        decided = real(round_, wanted)
        if how == "tell":
            say(note="decided")
        return decided

    Round._decide = decide
    try:
        yield
    finally:
        Round._decide = real


class Late:
    """An operation fails, and takes effect all the same once the next one begins."""

    def __init__(self):
        self.deferred = None

    def __call__(self, call, proceed):
        if self.deferred is None:
            self.deferred = functools.partial(proceed, call)
            return testing().Failed(call.operation.error("Input/output error"))
        # For all but the first time this changes nothing.
        self.deferred().result()
        return proceed(call)


# --- what a member does ---------------------------------------------------------------

EXPECTED_ERRORS = (OSError, RuntimeError, ValueError, AssertionError, LookupError)


class Member:
    """One process of the job, and the manager that it has open."""

    def __init__(self):
        self.manager = None
        self.handler = None
        self.group = None
        self.released = threading.Event()
        self.handler_seconds = None
        self._broken = contextlib.ExitStack()
        self._begun = 0.0

    def hold(self):
        """Tell the parent, and wait until it says that this may go on."""
        say(note="held")
        self.released.wait()

    def do_open(
        self, root, appears_within=10, group=None, smallest_shard=None, **options
    ):
        """Open a manager.

        Args:
            root: Its root.
            appears_within: Seconds within which the primary's files must be seen.
            group: The processes that use it, the primary first; None: all.
            smallest_shard: Bytes of the smallest one that is compared on its device.
            **options: Of `DeltaOptions`.
        """
        import orbax.checkpoint as ocp

        from orbax_delta import agreement, selection

        agreement._APPEARS_WITHIN_SECONDS = appears_within
        if smallest_shard is not None:
            selection.SMALLEST_SHARD_BYTES = smallest_shard
        self.group, together = group, ocp.options.MultiprocessingOptions()
        if group is not None:
            options["processes"] = group
            together = ocp.options.MultiprocessingOptions(
                primary_host=group[0],
                active_processes=set(group),
                barrier_sync_key_prefix=f"group_of_{group[0]}",
            )
        registry = orbax_delta().handler_registry(**{**OPTIONS, **options})
        self.handler = registry.get("default", orbax_delta().DeltaSave)
        # Orbax lets nobody know before all processes have come to its barriers.
        self.handler._run = self._told_at_once(self.handler._run)
        self.manager = ocp.CheckpointManager(
            Path(root),
            handler_registry=registry,
            options=ocp.CheckpointManagerOptions(
                create=group is None, multiprocessing_options=together
            ),
        )
        return {"steps": sorted(self.manager.all_steps())}

    def _told_at_once(self, run):
        def told(request):
            try:
                run(request)
            except Exception:
                self.handler_seconds = time.monotonic() - self._begun
                say(note="failed")
                raise

        return told

    def do_close(self):
        """Close the manager."""
        self.manager.close()
        self.manager = None
        return {}

    def do_save(self, step, version, mesh, edit=None):
        """Save and wait; what was written, or the error and when it came."""
        import orbax.checkpoint as ocp

        tree = edited(state(version, mesh, self.group), edit)
        self._begun, self.handler_seconds = time.monotonic(), None
        try:
            where = "save"
            self.manager.save(step, args=ocp.args.StandardSave(tree))
            where = "wait"
            self.manager.wait_until_finished()
        except (orbax_delta().errors.DeltaError, *EXPECTED_ERRORS) as error:
            seconds = time.monotonic() - self._begun
            self.manager.reload()
            return {
                "error": {"kind": type(error).__name__, "message": str(error)},
                "where": where,
                "seconds": seconds,
                "handler_seconds": self.handler_seconds,
            }
        return {
            "error": None,
            "report": self.handler.last_save_report.to_document(),
            "seconds": time.monotonic() - self._begun,
        }

    def do_restore(self, step, mesh=None, only=None, numpy=(), live=None, without=None):
        """Restore onto a mesh; without one: as it was saved, with no target.

        Args:
            step: Which step.
            mesh: Mesh to restore onto.
            only: Leaves to restore.
            numpy: Leaves that are wanted as numpy.
            live: Version and mesh of a state that is at hand.
            without: A process where it is not.
        """
        import jax
        import orbax.checkpoint as ocp

        wanted = None if mesh is None else target(mesh, self.group)
        if wanted is not None:
            names = [name for name in wanted if only is None or name in only]
            wanted = {name: wanted[name] for name in names}
            wanted |= {name: np.zeros_like(content(0)[name]) for name in numpy}
        args = ocp.args.StandardRestore(wanted)
        if only is not None:
            args = orbax_delta().DeltaRestore(wanted, partial_restore=True)
        if live is not None and jax.process_index() != without:
            args = orbax_delta().DeltaRestore(wanted, base=state(*live, self.group))
        got = self.manager.restore(step, args=args)
        for name, leaf in (wanted or {}).items():
            layout = getattr(leaf, "sharding", None)
            assert layout is None or got[name].sharding == layout, name
        return {name: described(leaf) for name, leaf in got.items()}

    def do_restore_good(self, step, mesh, how):
        """Restore a step or what stands in for it; which, or the error.

        Args:
            step: The step.
            mesh: Mesh to restore onto.
            how: `latest good`, or a value of `DeltaRestore.on_corruption`.
        """
        wanted = target(mesh)
        try:
            if how == "latest good":
                got = orbax_delta().restore_latest_good(self.manager, wanted)[1]
            else:
                args = orbax_delta().DeltaRestore(wanted, on_corruption=how)
                got = self.manager.restore(step, args=args)
        except orbax_delta().errors.DeltaError as error:
            return {"error": {"kind": type(error).__name__, "message": str(error)}}
        return {"tree": {name: described(leaf) for name, leaf in got.items()}}

    def do_restore_base(self, root, mesh):
        """Restore the newest kept base that all can restore."""
        _, got = orbax_delta().restore_base(root, target(mesh))
        return {"tree": {name: described(leaf) for name, leaf in got.items()}}

    def do_save_by_some(self, path, processes, mesh=None):
        """Some of the processes save a checkpoint; what became of it.

        Args:
            path: Where to.
            processes: Which.
            mesh: Mesh of the state; None: a numpy array.
        """
        import orbax.checkpoint as ocp

        delta = orbax_delta()
        some = ocp.options.MultiprocessingOptions(
            primary_host=processes[0],
            active_processes=set(processes),
            barrier_sync_key_prefix="some",
        )
        tree = state(0, mesh) if mesh else {"host": content(0)["host"]}
        options = delta.DeltaOptions(processes=tuple(processes))
        handler = delta.DeltaCheckpointHandler(options)
        with ocp.Checkpointer(handler, multiprocessing_options=some) as checkpointer:
            try:
                checkpointer.save(Path(path), delta.DeltaSave(tree))
            except delta.errors.DeltaError as error:
                return {"error": {"kind": type(error).__name__, "message": str(error)}}
        return {"error": None}

    def do_save_alone(self, path, version, mesh):
        """Save without a manager: a checkpoint that needs no store."""
        import orbax.checkpoint as ocp

        handler = orbax_delta().DeltaCheckpointHandler()
        with ocp.Checkpointer(handler) as checkpointer:
            tree = state(version, mesh)
            checkpointer.save(Path(path), orbax_delta().DeltaSave(tree))
        return {}

    def do_restore_alone(self, path, mesh):
        """Restore such a checkpoint."""
        import orbax.checkpoint as ocp

        handler = orbax_delta().DeltaCheckpointHandler()
        with ocp.Checkpointer(handler) as checkpointer:
            args = orbax_delta().DeltaRestore(target(mesh))
            got = checkpointer.restore(Path(path), args)
        return {name: described(leaf) for name, leaf in got.items()}

    def do_train_until_preempted(self, step, mesh, signalled=None):
        """Save each fifth step until a preemption is near, and then once more.

        Args:
            step: First step.
            mesh: Mesh of the state.
            signalled: Step in which this process is told of a preemption.
        """
        from jax.experimental import multihost_utils

        saves = []
        while not self.manager.reached_preemption(step):
            multihost_utils.sync_global_devices(f"step {step}")
            if step == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            if step % 5 == 0:
                saves.append(self.do_save(step, step, mesh))
            step += 1
        return {
            "step": step,
            "last": self.do_save(step, step, mesh),
            "saves": saves,
        }

    def do_break(self, *, rules=(), decision=None):
        """From now on the store is broken as the rules say.

        Args:
            rules: Arguments of `broken`.
            decision: Before this process tries to write a verdict it has to `wait`, or
                when it has tried it is to `tell`.
        """
        self.released.clear()
        faults = testing().faults(*(broken(self, **rule) for rule in rules))
        self._broken.enter_context(faults)
        if decision is not None:
            self._broken.enter_context(watched_decision(self, decision))
        return {}

    def do_mend(self):
        """From now on the store works."""
        self._broken.close()
        return {}

    def do_ask_service(self):
        """What the coordination service answers where it refuses or has nothing."""
        from jax._src import distributed

        client = distributed.global_state.client

        def refusal(call, *arguments):
            try:
                return call(*arguments).decode()
            except RuntimeError as error:
                return str(error).partition(":")[0]

        client.key_value_set_bytes("rules/a", b"1")
        answers = {
            "set again": refusal(client.key_value_set_bytes, "rules/a", b"2"),
            "get": refusal(client.key_value_try_get_bytes, "rules/a"),
            "get none": refusal(client.key_value_try_get_bytes, "rules/b"),
            "wait for none": refusal(client.blocking_key_value_get_bytes, "rules/b", 1),
        }
        client.key_value_delete("rules/")
        answers["deleted"] = refusal(client.key_value_try_get_bytes, "rules/a")
        return answers

    def do_keys(self):
        """What this package has in the coordination service."""
        from jax._src import distributed

        client = distributed.global_state.client
        found = client.key_value_dir_get_bytes("orbax_delta/")
        return {"keys": sorted(key for key, _ in found)}


def say(**words):
    """A line for the parent."""
    ANSWERS.write(json.dumps(words) + "\n")
    ANSWERS.flush()


def read_commands(member, commands):
    """Pass on what standard input says, without delay what frees this member."""
    for line in sys.stdin:
        words = json.loads(line)
        if words["do"] == "release":
            member.released.set()
        else:
            commands.put(words)
    # The parent has ended.
    os.kill(os.getpid(), signal.SIGKILL)


def join(rank, size, port, heartbeat_seconds=100):
    """Become a member of the job; one alone is a run without a job."""
    import jax

    if size > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            size,
            rank,
            coordinator_bind_address=f"127.0.0.1:{port}",
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=20,
        )


def leave(member):
    """Leave the job in order."""
    import jax

    if member.manager is not None:
        member.manager.close()
    jax.distributed.shutdown()
    sys.stderr.flush()
    os._exit(0)


def end_at_once(*error):
    """Say what went wrong and end, without waiting for the others."""
    traceback.print_exception(*error)
    sys.stderr.flush()
    os._exit(1)


def main(settings):
    """Join, then do what is told."""
    sys.excepthook = end_at_once
    faulthandler.register(signal.SIGUSR1)  # what the parent asks before it kills
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # jax aborts when a peer is gone
    member, commands = Member(), queue.SimpleQueue()
    threading.Thread(target=read_commands, args=(member, commands), daemon=True).start()
    join(**settings)
    children.without_disk_sync()
    say(answer={})
    while (words := commands.get())["do"] != "leave":
        answer = getattr(member, "do_" + words.pop("do"))(**words)
        say(answer=answer)
    leave(member)


if __name__ == "__main__":
    # Libraries print to standard output too; answers go where only we write.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(json.loads(sys.argv[1]))
