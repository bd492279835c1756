// Compiles grammars in GBNF, the notation of llama.cpp, to regular languages
// (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// Returns the texts that match the rule `root`. Recursion at the end of a rule is exact. Other
// recursive references may nest up to `max_depth` times. The default is 3, or less if the automaton
// would exceed the limits. Throws "grammar: line L, column C: ..." if the text is not a grammar or
// uses something unsupported.
Node grammar(Expressions& expressions, std::string_view text,
             std::optional<uint32_t> max_depth = std::nullopt);

}  // namespace dlm::compile
