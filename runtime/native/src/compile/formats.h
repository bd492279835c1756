// The formats of JSON Schema as regular languages
// (https://json-schema.org/draft/2020-12/json-schema-validation#section-7).
#pragma once

#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// Returns whether the specification defines the format `name`. Other formats are annotations.
bool is_format(std::string_view name);

// Returns the JSON strings of a format, without their quotes (json_text.h). Every validator accepts
// these strings. Strings that only some validators accept are left out. Requires is_format(name).
Node format_in_string(Expressions& expressions, std::string_view name);

}  // namespace dlm::compile
