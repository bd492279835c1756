// Compiles grammars to regular languages. The grammars use GBNF, the notation of llama.cpp
// (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// Returns the texts that match the rule `root`. For example, `root ::= "a" root | "b"` matches b,
// ab, aab and so on.
//
// A rule that refers to itself at its end, as in this example, may do so any number of times. Any
// other recursive reference may nest up to `max_depth` times. The default of `max_depth` is 3. The
// default is reduced if the automaton would exceed the limits.
//
// Throws "grammar: line L, column C: ..." if the text is not a valid grammar or uses something that
// is not supported.
Node grammar(Expressions& expressions, std::string_view text,
             std::optional<uint32_t> max_depth = std::nullopt);

}  // namespace dlm::compile
