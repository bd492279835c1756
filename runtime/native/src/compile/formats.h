// The formats of JSON Schema
// (https://json-schema.org/draft/2020-12/json-schema-validation#section-7) as regular languages.
#pragma once

#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// Whether `name` is a format of the specification. Other formats are annotations.
bool is_format(std::string_view name);

// Insides of JSON strings (json_text.h) of a format: strings that every validator accepts, and
// not all that some do. `is_format(name)` must hold.
Node format_in_string(Expressions& expressions, std::string_view name);

}  // namespace dlm::compile
