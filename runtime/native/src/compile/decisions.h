// Compiles the questions of a decision to an automaton over token ids. The automaton accepts an
// answer text: fixed text, and for each question one of its options.
//
// The automaton also tells the options apart. A state in which a text arrives right after it has
// completed an option has this option as a tag (`Automaton::tags`). Every text passes through one
// tag of each question. So the probability of an option is the probability of the texts that
// arrive in states with its tag. constraints/marginals.h computes it.
#pragma once

#include <string_view>

#include "compile/budget.h"
#include "compile/vocabulary.h"
#include "constraints/automaton.h"

namespace dlm::compile {

// `content` is JSON: {"parts": [...], "is_open": false}. A part is a fixed text, or a list of the
// 1 to 255 options of a question. Between two questions, there must be fixed text. If `is_open` is
// false, at least one end token follows the answer. If it is true, any tokens follow it. Throws
// Error(DLM_INVALID_ARGUMENT) if the content is not valid, if a text could be read as two
// different answers, if no tokens make an option, or if a limit is exceeded.
Automaton decisions(std::string_view content, const Vocabulary& vocabulary, Budget& budget);

}  // namespace dlm::compile
