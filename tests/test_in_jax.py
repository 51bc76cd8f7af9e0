"""The step in JAX that `benchmarks/population.py` measures is the loop's."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("jax", reason="jax is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["8x8", "32x32", "ViT", "ConvMixer"])
def test_one_step_in_jax_is_that_of_torch(case: str) -> None:
    import in_jax
    import jax
    import jax.numpy as jnp
    from population import data_of, recipe_of

    from weightscope.data.augment import normalise
    from weightscope.networks import build_for

    torch.manual_seed(0)
    recipe, data = recipe_of(case), data_of(case)
    network = build_for(recipe)
    before = in_jax.parameters([network])
    zeros = {k: jnp.zeros_like(v) for k, v in before.items()}
    arrays = (data.train_images[:64].numpy().transpose(0, 2, 3, 1), data.train_labels[:64].numpy())
    step = in_jax.stepping(recipe.to_dict()["network"], jnp.asarray(data.mean.numpy()), jnp.asarray(data.std.numpy()))
    run = jax.jit(jax.vmap(step, in_axes=(0, 0, 0, None, 0, 0)))
    after, first, _ = run(before, zeros, zeros, jnp.float32(1), *(jnp.asarray(a)[None] for a in arrays))

    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loss = F.cross_entropy(network(normalise(data.train_images[:64], data.mean, data.std)), data.train_labels[:64])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    for name, p in network.named_parameters():
        torch.testing.assert_close(torch.tensor(first[name][0].tolist()), 0.1 * p.grad, rtol=1e-3, atol=1e-6)
        # The first step of AdamW is the sign of the gradient, so that rounding counts where that is near zero.
        sure = p.grad.abs() > 1e-5
        torch.testing.assert_close(torch.tensor(after[name][0].tolist())[sure], p.detach()[sure], rtol=0, atol=1e-5)
