// Builds regular languages (sets of texts) for the keyword `format` of JSON Schema, such as "date"
// and "email" (https://json-schema.org/draft/2020-12/json-schema-validation#section-7).
#pragma once

#include <string_view>

#include "compile/automata/expression.h"

namespace dlm::compile {

// Returns true if the specification defines the format `name`. Formats with other names do not
// limit values.
bool is_format(std::string_view name);

// Returns the node for the set of JSON strings in the format `name`. The set contains only strings
// that every validator accepts. The strings have no quotes, and are escaped as in json_text.h.
// is_format(name) must be true. If the caller intersects the node with strings of a limited length,
// `is_counted` must be true. The node then contains fewer host names, so that the automaton of the
// intersection is not too large.
Node format_in_string(Expressions& expressions, std::string_view name, bool is_counted);

}  // namespace dlm::compile
