// Compiles grammars to regular languages (sets of texts). The grammars use GBNF, the notation of
// llama.cpp (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "compile/automata/expression.h"

namespace dlm::compile {

// Returns the texts that match the rule `root`. For example, `root ::= "a" root | "b"` matches b,
// ab, aab and so on.
//
// A rule may refer to itself at its end, as in the example above. The number of such repetitions is
// not limited. All other recursive references may be nested up to `max_depth` times. The default of
// `max_depth` is 3. If the automaton would be too large with this default, the function uses a
// smaller depth.
//
// Throws an error with the message "grammar: line L, column C: ..." if the text is not a valid
// grammar, or if the grammar uses an unsupported feature.
Node grammar(Expressions& expressions, std::string_view text, std::optional<uint32_t> max_depth);

}  // namespace dlm::compile
