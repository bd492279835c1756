// Patterns of JSON Schema: regular expressions of ECMA-262 with the flag u.
//
// https://tc39.es/ecma262/#sec-patterns. Escapes that the flag u forbids and browsers read without
// it, such as \- and \_, stand for their character.
#pragma once

#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// The insides of JSON strings (json_text.h) that a match of `pattern` is found in. Throws for a
// pattern that is not valid, or not supported: "pattern '...' has ... at character N".
Node pattern_in_string(Expressions& expressions, std::string_view pattern);

// The same for texts that are not JSON.
Node pattern_in_text(Expressions& expressions, std::string_view pattern);

}  // namespace dlm::compile
