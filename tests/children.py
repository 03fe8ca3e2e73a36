"""What the tests run in processes of their own: lives that end by SIGKILL.

`python children.py train ROOT SETTINGS` trains until its fuse burns down. A life says
on its standard output what it found and did, a JSON document a line; it ends when its
parent does. Does not belong here: judging what is left, and anything slow to import.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np

SMALL = {
    "chunk_bytes": 2048,
    "pack_bytes": 8192,
    "full_every": 3,
    "refresh_every": 4,
    "threads": 1,
}
"""Options under which a small state has many chunks, packs and turns."""

KEPT_STEPS = 3
_STORE_CALLS = (
    *("start_write", "create", "read", "start_read", "names", "find", "unfinished"),
    *("delete", "clear"),
)
_DISK_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def state(step):
    """The state after `step` steps: dense, sparse, frozen, derived and constant."""
    rng = np.random.default_rng(7)
    dense = rng.standard_normal(1500).astype(np.float32)
    table = rng.standard_normal((400, 4)).astype(np.float32)
    for earlier in range(step + 1):
        dense *= np.float32(1.001)
        table[earlier * 7 % 400] += 1
    return {
        "dense": dense,
        "table": table,
        "half": table.astype(ml_dtypes.bfloat16),
        "frozen": np.arange(900) ** 3,
        "zeros": np.zeros(300),
        "step": step,
        "name": f"step {step}",
    }


def same_leaf(got, wanted):
    """Type, shape and every bit agree."""
    if not isinstance(wanted, np.ndarray):
        return type(got) is type(wanted) and got == wanted
    return (
        (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    ) and got.tobytes() == wanted.tobytes()


def same_state(got, step):
    """Whether a restored tree is the state of a step."""
    wanted = state(step)
    return got.keys() == wanted.keys() and all(
        same_leaf(got[name], wanted[name]) for name in wanted
    )


def say(**words):
    """A line for the parent."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def die():
    """End as a process ends that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_parent():
    """End when the parent's end of our standard input is closed."""

    def wait():
        # Not `sys.stdin`, whose lock the end of the interpreter waits for.
        os.read(0, 1)
        die()

    threading.Thread(target=wait, daemon=True).start()


class Fuse:
    """Kills this process at a moment that a seed can find again.

    Attributes:
        kind: What `left` counts: `before` and `within` operations of the store, `bytes`
            that it writes, `disk` for what Orbax and others do to folders, or `wall`
            for milliseconds from the first save on; `none`: never.
        left: How many of them are left.
    """

    def __init__(self, kind, left):
        self.kind, self.left = kind, left
        self._lock = threading.Lock()

    def burn(self, amount):
        """Count down; at the end of it there is no way back."""
        with self._lock:
            self.left -= amount
            if self.left <= 0:
                die()

    def install(self):
        """Let every operation burn it."""
        from orbax_delta.store import Folder

        for name in _STORE_CALLS:
            if hasattr(Folder, name):
                setattr(Folder, name, self._burning(name, getattr(Folder, name)))
        if self.kind == "disk":
            sys.addaudithook(
                lambda event, _: self.burn(1) if event in _DISK_EVENTS else None
            )

    def _burning(self, name, call):
        def burning(folder, *arguments, **named):
            if self.kind == "before":
                self.burn(1)
            result = call(folder, *arguments, **named)
            if self.kind == "within":
                # The write has only begun: some of it may be on the disk.
                self.burn(1)
            elif self.kind == "bytes" and name == "start_write":
                self.burn(len(arguments[1]))
            return result

        return burning

    def first_save(self):
        """From now on time counts."""
        if self.kind == "wall":
            timer = threading.Timer(self.left / 1000, die)
            timer.daemon = True
            timer.start()


def open_manager(root, **options):
    """A manager as the README advertises it."""
    import orbax.checkpoint as ocp

    import orbax_delta

    return ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(max_to_keep=KEPT_STEPS),
        handler_registry=orbax_delta.handler_registry(**{**SMALL, **options}),
    )


def restored(manager, step):
    """A step as it was saved, with Orbax's own arguments."""
    import orbax.checkpoint as ocp

    return manager.restore(step, args=ocp.args.StandardRestore())


def without_disk_sync():
    """Let the store write without fsync: a kill is no loss of power."""
    from orbax_delta import store

    real = store._spec

    def spec(url):
        if "://" in url:
            return real(url)
        return {"driver": "file", "path": url, "context": {"file_io_sync": False}}

    store._spec = spec


def is_whole(folder):
    """Whether a step's folder has all that belongs there."""
    names = {path.name.partition("-")[0] for path in (folder / "default").glob("*")}
    return names >= {"MANIFEST", "part"}


def train(root, kind, left, saves):
    """One life: check what is there, go on from the latest step, save after save."""
    import orbax.checkpoint as ocp

    without_disk_sync()
    fuse = Fuse(kind, left)
    fuse.install()
    manager = open_manager(root)
    found = sorted(manager.all_steps())
    for step in found:
        if step not in found[-KEPT_STEPS:] and not is_whole(root / str(step)):
            continue  # its deletion was cut short
        if not same_state(restored(manager, step), step):
            say(wrong=step)
            return
    say(found=found)
    first = found[-1] + 1 if found else 0
    fuse.first_save()
    for step in range(first, first + saves):
        say(begun=step)
        manager.save(step, args=ocp.args.StandardSave(state(step)))
        if step % 3 == 2:
            manager.wait_until_finished()
            say(committed=step)
    manager.close()
    say(closed=True)


# --- a run in a bucket --------------------------------------------------------------


def train_in_bucket(url, kind, left, saves):
    """One life of a run in a bucket; without a manager, which would need s3fs."""
    from etils import epath

    import orbax_delta
    from orbax_delta.store import Folder

    def item(step):
        return epath.Path(f"{url}/{step}/default")

    fuse = Fuse(kind, left)
    fuse.install()
    handler = orbax_delta.DeltaCheckpointHandler(orbax_delta.DeltaOptions(**SMALL))
    manifests = Folder(url).find("MANIFEST", max_depth=2, skip="_delta_store")
    found = sorted(int(key.partition("/")[0]) for key in manifests)
    for step in found:
        if not same_state(handler.restore(item(step)), step):
            say(wrong=step)
            return
    say(found=found)
    first = found[-1] + 1 if found else 0
    fuse.first_save()
    for step in range(first, first + saves):
        handler.save(item(step), orbax_delta.DeltaSave(state(step)))
        handler.finalize(item(step))
        say(committed=step)
        if step >= KEPT_STEPS:
            # In an order in which no half of a step is ever taken for one.
            old = Folder(f"{url}/{step - KEPT_STEPS}/default")
            old.delete("MANIFEST")
            old.clear()
    handler.close()
    say(closed=True)


# --- prunes without end -------------------------------------------------------------


def prune_without_end(root):
    """Prune again and again until killed; a line for each."""
    from orbax_delta import errors, prune
    from orbax_delta.store import DeltaStore, Folder

    without_disk_sync()
    while True:
        store = DeltaStore.open(Folder(str(root)))
        if store is None:
            continue
        try:
            say(gone=len(prune.execute(store, prune.plan(store))))
        except errors.DeltaError as error:
            say(error=str(error))


# --- one of two jobs ----------------------------------------------------------------


def job(root, item, first):
    """Save an item as every other step, delete one, sweep as it comes."""
    import orbax.checkpoint as ocp

    import orbax_delta

    without_disk_sync()
    registry = orbax_delta.handler_registry(item=item, **SMALL)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        say(ready=True)
        sys.stdin.buffer.readline()
        for step in range(first, first + 40, 2):
            args = {item: ocp.args.StandardSave(state(step))}
            manager.save(step, args=ocp.args.Composite(**args), force=True)
            if step % 10 == first:
                manager.wait_until_finished()
                manager.delete(step)
    say(closed=True)


# --- a disk that is full ------------------------------------------------------------

PAGE = 4096


class Ballast:
    """A file that takes all room of a small disk but some pages."""

    def __init__(self, disk):
        self.path = disk / "ballast"

    def leave(self, pages):
        """Take what room there is, but for some pages."""
        self.drop()
        free = os.statvfs(self.path.parent).f_bavail
        with self.path.open("wb") as file:
            file.write(bytes(PAGE * max(0, free - pages)))

    def drop(self):
        """Give all room back."""
        self.path.unlink(missing_ok=True)


def noise(step, size=60_000):
    """A state of which nothing can be saved by deltas."""
    return {"w": np.random.default_rng(step).standard_normal(size // 8), "step": step}


def is_noise(got, step, size=60_000):
    """Whether a restored tree is `noise(step)`."""
    wanted = noise(step, size)
    return got.keys() == wanted.keys() and all(
        same_leaf(got[name], wanted[name]) for name in wanted
    )


def try_to_save(manager, step, tree):
    """Save and wait; None, or what was raised as its kind and message."""
    import orbax.checkpoint as ocp

    try:
        manager.save(step, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    except OSError as error:
        return type(error).__name__, str(error)
    return None


def restored_after(failure, manager, step):
    """A step; where a save failed for Orbax and for us, the other may come only now."""
    try:
        return restored(manager, step)
    except OSError as error:
        if failure is None or failure[0] == type(error).__name__:
            raise
        say(step=step, kind=type(error).__name__, message=str(error))
        return restored(manager, step)


def fill_within_a_save(disk):
    """Saves with less and less room; after each failure there is room again."""
    root, ballast = disk / "run", Ballast(disk)
    manager = open_manager(root, pack_bytes=20_000)
    step, right = 0, set()
    for pages in (*range(30), *range(30, -1, -3)):
        ballast.leave(pages)
        failure = try_to_save(manager, step, noise(step))
        # When Orbax finds no room for its own files, our save may still come right.
        if failure is None or failure[0] == "OSError":
            right.add(step)
        if failure is not None:
            say(pages=pages, step=step, kind=failure[0], message=failure[1])
        # Earlier steps restore while the disk is full.
        manager.reload()
        kept = sorted(manager.all_steps())
        assert right >= set(kept), (kept, right)
        assert all(is_noise(restored_after(failure, manager, s), s) for s in kept)
        ballast.drop()
        step += 1
        first, failure = failure, try_to_save(manager, step, noise(step))
        if first and failure and first[0] != failure[0]:
            # Of Orbax's failure and ours in one save, it tells of one at a time.
            say(pages=pages, step=step - 1, kind=failure[0], message=failure[1])
            manager.reload()
            failure = try_to_save(manager, step, noise(step))
        assert failure is None, failure
        right.add(step)
        assert is_noise(restored(manager, step), step)
        step += 1
    manager.close()
    say(steps=sorted(manager.all_steps()), whole=sorted(right)[-KEPT_STEPS:])


def only_deletion_helps(disk):
    """A disk filled by steps: after one is deleted a save has room again."""
    root = disk / "run"
    manager = open_manager(root)
    size, step, failures = 520_000, 0, 0
    whole = []
    while failures < 4 and step < 60:
        failure = try_to_save(manager, step, noise(step, size))
        if failure is None:
            whole.append(step)
        else:
            failures += 1
            say(step=step, kind=failure[0], message=failure[1])
            manager.reload()
            kept = sorted(manager.all_steps())
            assert kept == whole[-len(kept) :]
            assert all(is_noise(restored(manager, s), s, size) for s in kept)
            manager.delete(kept[0])
        step += 1
    say(steps=sorted(manager.all_steps()), whole=whole)
    manager.close()


def prune_on_a_full_disk(disk):
    """Dead packs and no room at all: a prune works or says what to do."""
    from orbax_delta import errors, prune
    from orbax_delta.store import DeltaStore, Folder

    root, ballast = disk / "run", Ballast(disk)
    alone = {"auto_prune": False, "keep_bases": 0, "full_every": 0}
    with open_manager(root, **alone) as manager:
        for step in range(4):
            assert try_to_save(manager, step, noise(step)) is None
    store = DeltaStore.open(Folder(str(root)))
    for pages in (0, 1):
        ballast.leave(pages)
        planned = prune.plan(store)
        before = sorted(store.packs.names())
        try:
            gone = prune.execute(store, planned)
        except errors.StorageError as error:
            say(pages=pages, dead=len(planned.dead), message=str(error))
            assert sorted(store.packs.names()) == before
            assert store.condemned.names() == []
        else:
            say(pages=pages, dead=len(planned.dead), gone=len(gone))
    with open_manager(root) as manager:
        kept = sorted(manager.all_steps())
        say(steps=kept, whole=[s for s in kept if is_noise(restored(manager, s), s)])


FULL_DISK = {
    function.__name__: function
    for function in (fill_within_a_save, only_deletion_helps, prune_on_a_full_disk)
}


def main(arguments):
    """Do what the command line says."""
    if arguments[0] == "job":
        job(Path(arguments[1]), arguments[2], int(arguments[3]))
        return
    die_with_parent()
    if arguments[0] == "train":
        train(Path(arguments[1]), **json.loads(arguments[2]))
    elif arguments[0] == "bucket":
        train_in_bucket(arguments[1], **json.loads(arguments[2]))
    elif arguments[0] == "prune":
        prune_without_end(Path(arguments[1]))
    else:
        without_disk_sync()
        FULL_DISK[arguments[0]](Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
