"""Tinker's client against a server: trains, samples, saves, loads. Arguments: its URL, the model's folder."""

import sys

import numpy as np
import tinker
from tinker import types

URL, FOLDER = sys.argv[1:3]
service = tinker.ServiceClient(base_url=URL, api_key="tml-none")
server = tinker.RestClient(base_url=URL, api_key="tml-none")
(model,) = server.get_server_capabilities().result().supported_models
training = service.create_lora_training_client(base_model=model.model_name, rank=4, seed=1).result()
info = training.get_info()
assert info.lora_rank == 4 and info.model_data.model_name == model.model_name
tokenizer = training.get_tokenizer()
prompt = tokenizer.encode("What is 3+4?")
tokens = [*prompt, *tokenizer.encode("7"), tokenizer.eos_token_id]


def datum(**inputs):
    """The row of these tokens."""
    targets = np.array(tokens[1:])
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets, **arrays},
    )


weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
losses = []
for _ in range(4):
    done = training.forward_backward([datum(weights=weights)] * 3, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(done.result().metrics["loss:sum"])
    assert step.result().metrics["grad_norm:mean"] > 0
    logp = done.result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert abs(-3 * logp @ weights - losses[-1]) < 1e-3
assert losses[-1] < losses[0]

sampler = training.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=8, seed=5, temperature=1.0)
found = sampler.sample(types.ModelInput.from_ints(prompt), 3, params, include_prompt_logprobs=True).result()
assert len(found.sequences) == 3 and len({each.sequence_id for each in found.sequences}) == 3
again = sampler.sample(types.ModelInput.from_ints(prompt), 3, params).result()
assert [each.tokens for each in found.sequences] == [each.tokens for each in again.sequences]
logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
assert np.allclose(found.prompt_logprobs[1:], logprobs[1:], atol=1e-5)
sequence = found.sequences[0]
row = types.Datum(
    model_input=types.ModelInput.from_ints([*prompt, *sequence.tokens][:-1]),
    loss_fn_inputs={"target_tokens": np.array([*prompt, *sequence.tokens][1:])},
)
seen = training.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
assert np.abs(seen[len(prompt) - 1 :] - sequence.logprobs).max() < 1e-4
assert np.abs(seen[: len(prompt) - 1] - found.prompt_logprobs[1:]).max() < 1e-4

saved = training.save_state("one").result().path
loaded = service.create_training_client_from_state_with_optimizer(saved).result()
for client in (training, loaded):
    client.forward_backward([datum(weights=weights)], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
answers = [c.forward([datum(weights=weights)], "cross_entropy").result() for c in (training, loaded)]
one, other = (answer.loss_fn_outputs[0]["logprobs"].to_numpy() for answer in answers)
assert np.abs(one - other).max() < 1e-5
named = training.save_weights_for_sampler("two").result().path
for source in ({"model_path": named}, {"base_model": model.model_name}):
    sampler = service.create_sampling_client(**source).result()
    sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()


def custom(data, logprobs):
    """A loss of the client's own."""
    return -sum(each[-2:].sum() for each in logprobs), {"mine:mean": 1.0}


try:
    training.forward_backward([datum(weights=weights)], "stable_reinforce").result()
except tinker.RequestFailedError as error:
    assert "stable_reinforce" in str(error) and error.category == "user", error
else:
    raise AssertionError("an unknown loss was taken")
try:
    training.optim_step(types.AdamParams()).result()
except tinker.RequestFailedError as error:
    assert "stable_reinforce" in str(error)
try:
    import torch  # noqa: F401
except ImportError:
    pass
else:
    result = training.forward_backward_custom([datum(weights=weights)] * 2, custom).result()
    assert result.metrics["mine:mean"] == 1.0
training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
service.close("success").result()
print("fine")
