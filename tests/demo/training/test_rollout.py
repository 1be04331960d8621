"""Replies as traces: the target's own and the reference ones."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from sglang_hvd.demo.corpus.sessions import train_sessions
from sglang_hvd.demo.training.demo_tokenizer import END_ID, spellings, train_tokenizer
from sglang_hvd.demo.training.induction import init_as_copier
from sglang_hvd.demo.training.rollout import references, roll_out

SESSIONS = train_sessions("editing", count=20, seed=0)
TOKENIZER = train_tokenizer(SESSIONS, vocab_size=1024)


def test_references_are_what_a_good_assistant_answers_with_earlier_turns_before_it() -> None:
    traces = iter(references(SESSIONS, TOKENIZER))
    for session in SESSIONS:
        before = ""
        for number, turn in enumerate(session.turns):
            trace = next(traces)
            assert (trace.family, trace.turn) == ("editing", number)
            prompt = TOKENIZER.decode(trace.prompt_ids.tolist(), skip_special_tokens=False)
            assert prompt.startswith(before)
            assert prompt.count("user\n") >= number + 1
            assert turn.user in prompt
            reply = trace.output_ids.tolist()
            said = TOKENIZER.decode([token for token in reply if token != END_ID])
            if reply[-1] == END_ID:
                assert said == turn.assistant
            else:
                assert len(reply) == 320
                assert turn.assistant.startswith(said)
            before = prompt
    assert next(traces, None) is None


@torch.no_grad()
def test_a_roll_out_finds_the_replies_of_greedy_generation(config: PreTrainedConfig) -> None:
    config.vocab_size = TOKENIZER.get_vocab_size()
    target = AutoModelForCausalLM.from_config(config)
    init_as_copier(target, spellings(TOKENIZER), generator=torch.Generator().manual_seed(0))
    num_ended = []
    traces = roll_out(target, SESSIONS[:1], TOKENIZER, on_session=lambda: num_ended.append(1))
    assert len(num_ended) == 1
    assert [trace.turn for trace in traces] == list(range(len(SESSIONS[0].turns)))
    for trace in traces:
        prompt = torch.from_numpy(trace.prompt_ids).long()[None]
        found = target.generate(prompt, max_new_tokens=320, do_sample=False, eos_token_id=END_ID)
        assert trace.output_ids.tolist() == found[0, prompt.shape[1] :].tolist()
