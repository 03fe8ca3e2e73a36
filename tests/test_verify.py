"""What real compilers say of small steps: bytes, kernels, and that there is no room."""

import dataclasses
import functools
import io
import json

import compilers
import jax
import jax.numpy as jnp
import pytest
import rich.console
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from remat_policies import hlo
from remat_policies.devices import device
from remat_policies.errors import InvalidInputError, OverBudgetError
from remat_policies.verify import verify

LAYERS = 16
ROWS, COLUMNS = 8192, 512  # 16 MiB, and 256 MiB of all layers: more than fits on chip
SAVED_BYTES = LAYERS * ROWS * COLUMNS * 4


def shape(*sizes, dtype="float32", sharding=None):
    """An array that is not there."""
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=sharding)


def block(hidden, weight):
    """No matrix products: compiles in a second."""
    activation = checkpoint_name(jnp.sin(hidden * weight), "activation")
    return activation * weight


def gradient(policy):
    """Of the sum that a scan over rematerialised blocks ends in."""
    rematted = jax.checkpoint(block, policy=policy, prevent_cse=False)

    def loss(weights, hidden):
        hidden, _ = jax.lax.scan(lambda h, w: (rematted(h, w), None), hidden, weights)
        return hidden.sum()

    return jax.grad(loss)


@functools.cache
def scanned(policy, target):
    """The gradient's figures; compiled once, as several tests look at it."""
    return verify(gradient(policy), shape(LAYERS), shape(ROWS, COLUMNS), target=target)


POLICIES = jax.checkpoint_policies
SAVE = POLICIES.save_only_these_names("activation")
OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["activation"],
    offload_src="device",
    offload_dst="pinned_host",
)


@pytest.mark.parametrize("target", compilers.BOTH)
def test_what_a_policy_saves_is_what_memory_grows_by(target):
    """Each residual more is one array per layer more."""
    full = scanned(POLICIES.nothing_saveable, target)
    named = scanned(SAVE, target)
    everything = scanned(POLICIES.everything_saveable, target)
    near = pytest.approx(SAVED_BYTES, rel=0.01)
    assert named.temp_bytes - full.temp_bytes == near
    assert everything.temp_bytes - named.temp_bytes == near
    assert everything.hbm_bytes == sum(
        (
            everything.argument_bytes,
            everything.output_bytes,
            -everything.alias_bytes,
            everything.temp_bytes,
        )
    )
    assert everything.fits
    assert everything.available_bytes == device(target).hbm_bytes


@pytest.mark.parametrize("target", compilers.BOTH)
def test_offloaded_residuals_are_in_host_memory(target):
    """To the byte; on the device there is a layer or two of them in transit."""
    full, offloaded = (
        scanned(POLICIES.nothing_saveable, target),
        scanned(OFFLOAD, target),
    )
    assert full.host_bytes == 0
    assert offloaded.host_bytes == SAVED_BYTES
    assert offloaded.temp_bytes - full.temp_bytes < 3 * SAVED_BYTES / LAYERS
    assert "256.0 MiB more are in the host's memory" in offloaded.explain()


@compilers.needs_tpu_compiler
@compilers.needs_gpu_compiler
def test_flops_are_given_for_tpus_alone():
    """Recomputing a sine per layer costs; the GPU's compiler does not say."""
    full, named = scanned(POLICIES.nothing_saveable, "v5e"), scanned(SAVE, "v5e")
    assert full.flops > 0
    assert named.flops != full.flops
    assert scanned(SAVE, "h100").flops is None


@compilers.needs_tpu_compiler
def test_no_room_is_a_result():
    """What the TPU's compiler asked for, and what to do about it."""
    found = verify(lambda x: x + 1, shape(3 << 30), target="v5e")
    assert not found.fits
    assert found.out_of_memory.required_bytes == 24 << 30
    assert found.out_of_memory.available_bytes == device("v5e").hbm_bytes
    assert found.hbm_bytes == 24 << 30
    assert found.temp_bytes is None
    message = r"24\.00 GiB of each of 1 v5e; 15\.75 GiB are available, and the compiler"
    with pytest.raises(OverBudgetError, match=message) as caught:
        found.require_fit()
    assert caught.value.required_bytes == 24 << 30
    assert caught.value.available_bytes == device("v5e").hbm_bytes
    assert "shard over more devices" in found.explain()


@compilers.needs_gpu_compiler
def test_a_gpu_without_room_is_found_by_comparing():
    """Its compiler does not mind."""
    found = verify(lambda x: x + 1, shape(16 << 30), target="h100")
    assert found.out_of_memory is None
    assert found.hbm_bytes == 128 << 30
    assert not found.fits
    with pytest.raises(OverBudgetError, match=r"it does not fit\..*tighter policy"):
        found.require_fit()


@pytest.mark.parametrize("target", compilers.BOTH)
def test_donated_arguments_count_once(target):
    """The result takes their place."""
    size = 4 << 20
    found = verify(lambda x: x + 1, shape(size), target=target, donate_argnums=0)
    assert found.alias_bytes == 4 * size
    assert found.hbm_bytes - found.temp_bytes == 4 * size
    jitted = jax.jit(lambda x: x + 1, donate_argnums=0)
    again = verify(jitted, shape(size), target=target)
    assert again.alias_bytes == found.alias_bytes


@compilers.needs_gpu_compiler
def test_budget_and_headroom_bound_what_is_available():
    """Of a device, or of a variant of it."""
    size = 1 << 20
    add = functools.partial(verify, lambda x: x + 1, shape(size // 4), target="h100")
    assert add(budget_bytes=2 * size).require_fit().available_bytes == 2 * size
    tight = add(budget_bytes=2 * size, headroom=0.25)
    assert tight.available_bytes == 1.5 * size
    assert not tight.fits
    variant = dataclasses.replace(device("h100"), hbm_bytes=size)
    assert not verify(lambda x: x + 1, shape(size // 4), target=variant).fits


@pytest.mark.parametrize("target", compilers.BOTH)
def test_bytes_are_of_one_device_of_several(target):
    """A sharding on this machine's devices is taken over by the target's."""
    here = jax.make_mesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    rows = NamedSharding(here, PartitionSpec("data"))
    both = PartitionSpec("data", "model")

    def step(scale, x):
        return jax.lax.with_sharding_constraint(x * scale, both)

    avals = (shape(512), shape(1024, 512))
    given = verify(step, *avals, target=target, shardings=(None, rows))
    assert given.device_count == 8
    assert given.argument_bytes == 512 * 4 + 1024 * 512 * 4 // 2
    assert given.output_bytes == pytest.approx(1024 * 512 * 4 // 8, rel=0.01)
    own = verify(step, shape(512), shape(1024, 512, sharding=rows), target=target)
    assert own.argument_bytes == given.argument_bytes


@compilers.needs_tpu_compiler
@compilers.needs_gpu_compiler
def test_arguments_in_host_memory_are_no_device_memory():
    """For TPUs; for GPUs the compiler would count them wrong, so that is refused."""
    kept = NamedSharding(
        jax.make_mesh((1,), ("x",)), PartitionSpec(), memory_kind="pinned_host"
    )

    def step(x):
        return jax.device_put(x, jax.memory.Space.Device) + 1

    with pytest.raises(InvalidInputError, match="pinned_host memory, of which the GPU"):
        verify(step, shape(1024, 1024), target="h100", shardings=kept)
    found = verify(step, shape(1024, 1024), target="v5e", shardings=kept)
    assert found.argument_bytes == 0
    assert found.host_bytes == 4 << 20


@compilers.needs_gpu_compiler
def test_arguments_without_shape_are_passed_on():
    """Static ones, plain numbers, None and arrays that are here."""

    def step(name, x, options, scale):
        assert name == "twice"
        assert options["rest"] is None
        return x * scale + options["bias"]

    avals = ("twice", jnp.ones((8, 128)), {"rest": None, "bias": shape(128)}, 2.0)
    found = verify(step, *avals, target="h100", static_argnums=0)
    assert found.output_bytes == 8 * 128 * 4
    jitted = jax.jit(step, static_argnums=0)
    assert verify(jitted, *avals, target="h100").output_bytes == found.output_bytes


def test_calls_that_make_no_sense_are_refused():
    """Before anything is compiled."""
    x, here = shape(8), jax.make_mesh((2,), ("data",))
    other = jax.make_mesh((4,), ("model",))
    add = functools.partial(verify, lambda x: x, x, target="v5e")
    with pytest.raises(InvalidInputError, match="no device is called 'v5x'"):
        verify(lambda x: x, x, target="v5x")
    with pytest.raises(InvalidInputError, match=r"headroom=1\.0 is no share"):
        add(headroom=1.0)
    with pytest.raises(InvalidInputError, match="budget_bytes=0 is not within"):
        add(budget_bytes=0)
    with pytest.raises(InvalidInputError, match="not within the 16911433728 bytes of"):
        add(budget_bytes=1 << 40)
    with pytest.raises(InvalidInputError, match="jitted already: give donate_argnums"):
        verify(jax.jit(lambda x: x), x, target="v5e", donate_argnums=0)
    with pytest.raises(InvalidInputError, match="shardings is no prefix"):
        add(shardings=(None, None))
    with pytest.raises(InvalidInputError, match="holds a SingleDeviceSharding"):
        add(shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(InvalidInputError, match=r"different meshes: \{'data': 2\} and"):
        verify(
            lambda x, y: x,
            shape(8, sharding=NamedSharding(here, PartitionSpec())),
            shape(8, sharding=NamedSharding(other, PartitionSpec())),
            target="v5e",
        )


@compilers.needs_tpu_compiler
def test_other_failures_of_the_compiler_are_not_swallowed():
    """Only a lack of HBM is a result."""

    def too_much_on_chip(x):
        def kernel(source, target):
            target[...] = source[...] + 1

        return pl.pallas_call(kernel, out_shape=shape(*x.shape))(x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        verify(too_much_on_chip, shape(1024, 2560), target="v5e")


# --- what is read from text -----------------------------------------------------------


@compilers.needs_tpu_compiler
def test_pallas_kernels_are_counted_by_name():
    """Their own, or that of the jitted function around."""

    def add_one(source, target):
        target[...] = source[...] + 1

    def call(x, **options):
        return pl.pallas_call(add_one, out_shape=shape(*x.shape), **options)(x)

    @jax.jit
    def wrapped(x):
        return call(x)

    def step(x):
        return wrapped(call(call(x, name="named"), name="named"))

    assert verify(step, shape(256, 256), target="v5e").kernels == {
        "named": 2,
        "wrapped": 1,
    }


CUDNN_AND_OTHERS = """
  %a = (bf16[2]{0}, u8[0]{0}) custom-call(%q, %k), custom_call_target="__cudnn$fmhaSoftmax"
  %b = (bf16[2]{0}, u8[0]{0}) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %c.1 = f32[2]{0} custom-call(%q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %d = u8[4]{0} custom-call(), custom_call_target="AllocateBuffer"
  %splash_fwd.3.q = f32[2]{0} custom-call(%q), custom_call_target="tpu_custom_call"
  %e.2 = f32[2]{0} custom-call(%q), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/transpose(jvp(jit(flash)))/pallas_call"}
"""  # noqa: E501


def test_attention_kernels_are_told_from_bookkeeping():
    """Those of cuDNN by target, of Pallas by name; no notes of the compilers."""
    assert hlo.kernel_counts(CUDNN_AND_OTHERS) == {
        "__cudnn$fmhaSoftmax": 2,
        "__cudnn$fmhaSoftmaxBackward": 1,
        "flash": 1,
        "splash_fwd": 1,
    }


REMATTED = """
  %fusion.3 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused.remat
  %fusion.3.remat = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused.clone
  %fusion.3.remat2 = f32[8]{0} fusion(%fusion.3.remat), kind=kLoop
  %copy.remat_compressed = f32[8]{0} copy(%x)
  ROOT %dot.remat.1 = f32[8]{0} dot(%x, %y), metadata={op_name="jit(f)/rematted.remat"}
  %bitcast.remat.2 = f32[8]{0} bitcast(%x)
  %rematted.9 = f32[8]{0} add(%x, %fusion.3.remat2)
"""


def test_what_xla_recomputes_on_its_own_is_counted():
    """By where it is defined, not where it is used; a policy's own does not count."""
    assert hlo.hidden_remats(REMATTED) == 4


@compilers.needs_tpu_compiler
def test_a_program_that_fits_by_xlas_own_recomputation_is_told_of():
    """Its arrays alive at once are 18 GiB, in the 15.75 of a v5e."""

    def step(x):
        alive = [x]
        for _ in range(8):
            alive.append(jnp.roll(jnp.sin(alive[-1]), 1, axis=0))
        for value in reversed(alive):
            x = jnp.roll(x, 3, axis=0) * value
        return x

    found = verify(step, shape(1 << 19, 1024), target="v5e")
    assert found.fits
    assert found.hidden_remats > 0
    assert "values on its own, policy or not" in found.explain()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ("(46.50G) exceeds available HBM (15.75G)", (46.5 * 2**30, 15.75 * 2**30)),
        ("(1.25T) exceeds available HBM (95.73G)", (1.25 * 2**40, 95.73 * 2**30)),
        ("(512.00M) exceeds available HBM (128)", (2**29, 128)),
    ],
)
def test_lack_of_memory_is_read_as_numbers(sizes, expected):
    """Whatever the unit."""
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the "
        f"total memory required for HLO temporaries {sizes}. HLO module: jit_step."
    )
    assert hlo.hbm_overflow(message) == tuple(map(int, expected))
    assert hlo.hbm_overflow(message.replace("HBM", "VMEM")) is None


# --- what a result says of itself -----------------------------------------------------


@compilers.needs_gpu_compiler
def test_a_result_is_words_a_table_and_json():
    """All three tell the same."""
    found = scanned(OFFLOAD, "h100")
    remats = dataclasses.replace(found, hidden_remats=3, kernels={"flash": 2})
    words = remats.explain()
    assert words.startswith("The step needs 3")
    assert "MiB of each of 1 h100; 79.11 GiB are available: it fits." in words
    assert "recomputes 3 values on its own" in words
    assert "Calls of kernels: flash 2." in words
    console = rich.console.Console(width=80, record=True, file=io.StringIO())
    console.print(dataclasses.replace(remats, flops=1.5e12))
    table = console.export_text()
    assert "compiled for 1 x h100" in table
    assert "host memory" in table
    assert "256.0 MiB" in table
    assert "1.5e+12" in table
    assert "calls of flash" in table
    document = json.loads(found.to_json())
    assert document["temp_bytes"] == found.temp_bytes
    assert document["out_of_memory"] is None


@compilers.needs_gpu_compiler
def test_a_program_that_cannot_be_read_is_told_of(monkeypatch):
    """Bytes are known all the same; other failures are not swallowed."""
    said = []

    def refuse(_):
        raise jax.errors.JaxRuntimeError(said[0])

    monkeypatch.setattr(jax.stages.Compiled, "as_text", refuse)
    said.append(
        "INTERNAL: RET_CHECK failure (external/xla/xla/hlo/ir/hlo_instruction.cc:390)"
        " proto.operand_ids_size() == *arity async-update instruction should have 1"
        " operands but sees 3"
    )
    found = verify(lambda x: x * 2, shape(1024), target="h100")
    assert (found.hidden_remats, found.kernels) == (None, None)
    assert found.argument_bytes == 4096
    assert "are not known" in found.explain()
    with io.StringIO() as out:
        rich.console.Console(file=out, width=100).print(found)
        assert "not known" in out.getvalue()
    said[0] = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        verify(lambda x: x * 3, shape(1024), target="h100")
