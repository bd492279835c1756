// Regular expressions in the syntax of Rust's regex crate
// (https://docs.rs/regex/latest/regex/#syntax).
#pragma once

#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// The texts, as UTF-8, that `expression` matches as a whole. Throws "regex: ..." with the place for
// an expression that is not valid, or that no automaton can decide.
Node regex(Expressions& expressions, std::string_view expression);

}  // namespace dlm::compile
