// The tokens that lead from state to state of a byte automaton.
#pragma once

#include "compile/budget.h"
#include "compile/byte_automaton.h"
#include "compile/vocabulary.h"
#include "constraints/automaton.h"

namespace dlm::compile {

// The automaton of token ids whose texts `texts` accepts. Where a text may end, any number of end
// tokens may follow. Where only one text can follow a state, only the token that the tokenizer
// starts it with leads on, and tokens that go beyond it: so the loop can tell such tokens in
// advance, and the texts stay what they are. Throws when no tokens make such a text, and when a
// limit is reached. `texts` must be minimal, and not empty.
Automaton token_automaton(const ByteAutomaton& texts, const Vocabulary& vocabulary, Budget& budget);

}  // namespace dlm::compile
