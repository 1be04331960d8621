"""Reference replies as traces."""

from sglang_hvd.demo.corpus.sessions import train_sessions
from sglang_hvd.demo.rollout import references
from sglang_hvd.demo.tokenizer import END_ID, train_tokenizer

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
