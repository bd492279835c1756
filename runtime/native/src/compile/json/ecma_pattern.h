// Compiles the keyword `pattern` of JSON Schema to regular languages (sets of texts). A pattern is
// a regular expression in the syntax of ECMA-262 with the flag u. See
// https://tc39.es/ecma262/#sec-patterns.
//
// The flag u forbids escapes such as \- and \_. Browsers accept these escapes in expressions
// without the flag, and this compiler always accepts them. Such an escape matches the character
// after the backslash.
//
// Validators of JSON use the regex engines of their programming languages, and these engines
// differ. In Python, for example, \d and \w match more than ASCII, the dot matches every character
// except \n, and $ also matches before a \n at the end. So this compiler can build two sets of
// strings for a pattern. The first set contains the strings in which every engine finds a match. If
// a schema requires a match, only strings of the first set are allowed. The second set contains the
// strings in which at least one engine finds a match. If a schema forbids a match, all strings of
// the second set are excluded. So the generated text never contains a string on which engines
// disagree.
#pragma once

#include <cstdint>
#include <string_view>

#include "compile/automata/expression.h"

namespace dlm::compile {

// Selects one of the two sets of strings of a pattern. `surely` means the strings in which every
// engine finds a match. `perhaps` means the strings in which at least one engine finds a match.
enum class Found : uint8_t { surely, perhaps };

// Returns the JSON strings in which the pattern matches at any position. The strings have no
// quotes, and are escaped as in json_text.h. For example, for the pattern ^a$, the function returns
// only the string a. Throws an error if the pattern is not valid or not supported. The message is
// "pattern '...' has ... at character N".
Node pattern_in_string(Expressions& expressions, std::string_view pattern, Found found);

// Does the same as pattern_in_string(), but returns plain UTF-8 text instead of escaped JSON
// strings.
Node pattern_in_text(Expressions& expressions, std::string_view pattern, Found found);

}  // namespace dlm::compile
