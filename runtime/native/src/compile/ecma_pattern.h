// Patterns of JSON Schema: regular expressions of ECMA-262 with the flag u.
//
// https://tc39.es/ecma262/#sec-patterns. Escapes that the flag u forbids and browsers read without
// it, such as \- and \_, stand for their character.
//
// Validators use the engine of their language, and engines differ: in Python, \d and \w are not
// only ASCII, . is everything but \n, and $ is also before a last \n. So there are two languages of
// a pattern, and texts between them are written neither where it must match nor where it must not.
#pragma once

#include <cstdint>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// Texts that a match is found in: by ECMA-262 and every other engine, or by any of them.
enum class Found : uint8_t { surely, perhaps };

// The insides of JSON strings (json_text.h) that a match of `pattern` is found in. Throws for a
// pattern that is not valid, or not supported: "pattern '...' has ... at character N".
Node pattern_in_string(Expressions& expressions, std::string_view pattern, Found found);

// The same for texts that are not JSON.
Node pattern_in_text(Expressions& expressions, std::string_view pattern, Found found);

}  // namespace dlm::compile
