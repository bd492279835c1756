// Compiles the questions of a decision to an automaton over token ids. The automaton accepts
// answers. An answer is a text that consists of fixed texts and one option of each question.
//
// The automaton also shows which options a text has completed. If a token completes an option, the
// state after the token has this option as a tag (`Automaton::tags`). For each question, every
// answer reaches exactly one state that has one of the question's options as a tag. So the
// probability of an option is the total probability of the texts that reach a state with this tag.
// constraints/option_probs.h computes this probability.
#pragma once

#include <string_view>

#include "compile/automata/budget.h"
#include "compile/tokens/vocabulary.h"
#include "constraints/automaton.h"

namespace dlm::compile {

// `content` is JSON: {"parts": [...], "is_open": false}. A part is a fixed text, or a list of the 1
// to 255 options of a question. There must be a fixed text between two questions. If `is_open` is
// false, at least one end token follows the answer. If `is_open` is true, any tokens may follow the
// answer. Throws an Error with status DLM_INVALID_ARGUMENT if the content is not valid, if two
// different answers have the same text, if no tokens produce the text of an option, or if compiling
// exceeds a limit.
Automaton decisions(std::string_view content, const Vocabulary& vocabulary, Budget& budget);

}  // namespace dlm::compile
