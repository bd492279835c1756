// Compiles regular expressions in the syntax of Rust's regex crate
// (https://docs.rs/regex/latest/regex/#syntax).
#pragma once

#include <string_view>

#include "compile/automata/expression.h"

namespace dlm::compile {

// Returns the set of all UTF-8 texts that `expression` matches from start to end. Throws an error
// if the expression is not valid, or if it uses a feature that no automaton can represent. The
// message starts with "regex: ", and contains the position of the error.
Node regex(Expressions& expressions, std::string_view expression);

}  // namespace dlm::compile
