// Sets of code points: Unicode properties by name, case folding, and set operations.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

CodePoints intersection(const CodePoints& first, const CodePoints& second);
CodePoints joined(const CodePoints& first, const CodePoints& second);
bool contains(const CodePoints& points, char32_t point);

// Returns the set of \p{name}, or of \p{name=value} if `value` is given. Names are compared without
// case, spaces, - and _ (UAX #44, LM3). Returns nullopt if there is no such property.
std::optional<CodePoints> unicode_property(std::string_view name,
                                           std::optional<std::string_view> value = std::nullopt);

// \w of Unicode: letters, marks, decimal numbers, connector punctuation and joiners (UTS #18).
const CodePoints& unicode_word();
const CodePoints& unicode_digits();  // \d: decimal numbers
const CodePoints& unicode_spaces();  // \s: White_Space

// Adds every character that simple case folding maps to the same character as one of the set.
CodePoints with_all_cases(const CodePoints& points);

}  // namespace dlm::compile
