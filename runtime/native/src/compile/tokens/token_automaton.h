// Converts an automaton over bytes to an automaton over token ids.
#pragma once

#include "compile/automata/budget.h"
#include "compile/automata/byte_automaton.h"
#include "compile/tokens/vocabulary.h"
#include "constraints/automaton.h"

namespace dlm::compile {

// Returns an automaton over token ids that accepts the same texts as the byte automaton `texts`. At
// each end of a text, the returned automaton accepts any number of end tokens.
//
// If the next bytes after a state are the same in all accepted texts, these bytes are a forced
// text. In this case, the state gets an edge for the token with which the tokenizer starts the
// forced text, and edges for tokens that are longer than the forced text. The state gets no edges
// for other tokens. So the decoding loop can predict forced tokens. The automaton still accepts the
// same texts.
//
// `texts` must be minimal and not empty. Throws an error if no tokens produce an accepted text, or
// if compiling exceeds a limit.
Automaton token_automaton(const ByteAutomaton& texts, const Vocabulary& vocabulary, Budget& budget);

}  // namespace dlm::compile
