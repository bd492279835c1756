// Builds the regular languages of the CSV and XML texts that a JSON Schema describes.
#pragma once

#include <cstdint>
#include <utility>

#include "base/json.h"
#include "compile/expression.h"
#include "compile/schema/schema.h"

namespace dlm::compile::schema {

// Reads the members "low" and "high" of a description, each in 0..`most`. Without "high", there is
// no upper limit.
std::pair<uint32_t, uint32_t> counts(const json::Value& description, uint32_t low, int64_t most);

// Returns a part repeated `low` to `high` times, with a separator between repetitions.
Node separated(Expressions& expressions, Node part, Node separator, uint32_t low, uint32_t high);

// Both functions below throw Error(DLM_INVALID_ARGUMENT) with the place and the keyword.

// Returns the CSV texts (RFC 4180) of all tables that `description` allows. The description has
// these members:
//   "csv"        the schema of a row: an object whose properties are the columns
//   "header"     true (default) if the first line has the names of the columns
//   "delimiter"  "," (default), ";", "|" or a tab
//   "line_end"   "\n" (default) or "\r\n"
//   "low", "high"  minimum (default: 1) and maximum (default: unlimited) number of rows
// Fields are quoted only if necessary. A null, or a property that is left out, is written as an
// empty field.
Texts csv_texts(Expressions& expressions, const json::Value& description, const Options& options);

// Returns the XML texts of an element. They have no white space between elements. Properties are
// child elements in the schema's order. An array repeats its element. The keyword `xml` of OpenAPI
// (https://spec.openapis.org/oas/v3.1.0#xml-object) sets names, attributes and wrapped arrays.
Texts xml_texts(Expressions& expressions, const json::Value& schema, const Options& options);

}  // namespace dlm::compile::schema
