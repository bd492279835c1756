// Grammars in GBNF, the notation of llama.cpp
// (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md), as regular languages.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// The texts of the rule `root`. Recursion at the end of a rule is exact. Other recursive references
// may be inside each other `max_depth` times; by default 3 times, or less if the automaton would be
// too large for the limits. Throws "grammar: line L, column C: ..." for text that is not a grammar,
// and for what is not supported.
Node grammar(Expressions& expressions, std::string_view text,
             std::optional<uint32_t> max_depth = std::nullopt);

}  // namespace dlm::compile
