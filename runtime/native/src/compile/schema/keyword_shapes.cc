// Checks the shapes of the values of a subschema's keywords. Warns about keywords that look
// misspelled.
#include "compile/schema/keyword_shapes.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "compile/json/json_numbers.h"

namespace dlm::compile::schema {
namespace {

using json::Value;
using Kind = Value::Kind;

// The code may suggest a correction for a misspelled keyword. A suggested keyword has at least this
// many characters.
constexpr size_t kShortestWord = 4;

struct Entry {
  const char* name;
  Shape shape;
};

// The name and the shape of each keyword, in the order of the enumeration Keyword.
constexpr Entry kEntries[] = {
    {"type", Shape::types},
    {"enum", Shape::list},
    {"const", Shape::any},
    {"minimum", Shape::number},
    {"maximum", Shape::number},
    {"exclusiveMinimum", Shape::number},
    {"exclusiveMaximum", Shape::number},
    {"multipleOf", Shape::positive},
    {"minLength", Shape::count},
    {"maxLength", Shape::count},
    {"pattern", Shape::text},
    {"format", Shape::text},
    {"items", Shape::items},
    {"prefixItems", Shape::schemas},
    {"additionalItems", Shape::schema},
    {"minItems", Shape::count},
    {"maxItems", Shape::count},
    {"uniqueItems", Shape::boolean},
    {"contains", Shape::schema},
    {"minContains", Shape::count},
    {"maxContains", Shape::count},
    {"unevaluatedItems", Shape::schema},
    {"properties", Shape::map},
    {"patternProperties", Shape::map},
    {"additionalProperties", Shape::schema},
    {"propertyNames", Shape::schema},
    {"required", Shape::names},
    {"minProperties", Shape::count},
    {"maxProperties", Shape::count},
    {"dependentRequired", Shape::names_by_name},
    {"dependentSchemas", Shape::map},
    {"dependencies", Shape::dependencies},
    {"unevaluatedProperties", Shape::schema},
    {"$ref", Shape::text},
    {"$dynamicRef", Shape::text},
    {"$recursiveRef", Shape::text},
    {"allOf", Shape::schemas},
    {"anyOf", Shape::schemas},
    {"oneOf", Shape::schemas},
    {"not", Shape::schema},
    {"if", Shape::schema},
    {"then", Shape::schema},
    {"else", Shape::schema},
    {"$schema", Shape::text},
    {"$id", Shape::any},
    {"id", Shape::any},
    {"$anchor", Shape::any},
    {"$dynamicAnchor", Shape::any},
    {"$recursiveAnchor", Shape::any},
    {"$defs", Shape::any},
    {"definitions", Shape::any},
};
static_assert(std::size(kEntries) == static_cast<size_t>(Keyword::count));
// The keywords that the specification and OpenAPI define as annotations. Annotations do not
// constrain values, so the compiler ignores them without a warning.
const std::unordered_set<std::string_view>& annotations() {
  static const auto* const made = new std::unordered_set<std::string_view>{"$vocabulary",
                                                                           "$comment",
                                                                           "title",
                                                                           "description",
                                                                           "default",
                                                                           "examples",
                                                                           "deprecated",
                                                                           "readOnly",
                                                                           "writeOnly",
                                                                           "contentEncoding",
                                                                           "contentMediaType",
                                                                           "contentSchema",
                                                                           "example",
                                                                           "nullable",
                                                                           "discriminator",
                                                                           "xml",
                                                                           "externalDocs"};
  return *made;
}

bool is_list_of_names(const Value& value) {
  return value.kind() == Kind::array &&
         std::all_of(value.elements().begin(), value.elements().end(),
                     [](const Value& each) { return each.kind() == Kind::string; });
}

constexpr std::string_view kTypes[] = {"array",  "boolean", "integer", "null",
                                       "number", "object",  "string"};

bool is_type(const Value& value) {
  return value.kind() == Kind::string &&
         std::find(std::begin(kTypes), std::end(kTypes), value.string()) != std::end(kTypes);
}

// Returns the edit distance of two words. This is the restricted Damerau-Levenshtein distance, in
// which swapping two neighbouring letters is one edit. If two words differ only in case, their
// distance is 1.
size_t distance(std::string_view one, std::string_view other) {
  const auto lower = [](std::string_view text) {
    std::string out(text);
    for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return out;
  };
  if (lower(one) == lower(other)) return one == other ? 0 : 1;
  std::vector<size_t> before, last(other.size() + 1), row;
  for (size_t j = 0; j < last.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= one.size(); ++i) {
    row.assign(1, i);
    for (size_t j = 1; j <= other.size(); ++j) {
      size_t cost = std::min(
          {last[j] + 1, row[j - 1] + 1, last[j - 1] + (one[i - 1] != other[j - 1] ? 1 : 0)});
      if (i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1])
        cost = std::min(cost, before[j - 2] + 1);
      row.push_back(cost);
    }
    before.swap(last), last.swap(row);
  }
  return last.back();
}

}  // namespace

Shape shape_of(Keyword keyword) { return kEntries[static_cast<size_t>(keyword)].shape; }

const std::unordered_map<std::string_view, Keyword>& keywords() {
  static const auto* const made = [] {
    auto* const map = new std::unordered_map<std::string_view, Keyword>;
    for (size_t i = 0; i < std::size(kEntries); ++i)
      map->emplace(kEntries[i].name, static_cast<Keyword>(i));
    return map;
  }();
  return *made;
}

std::string_view Document::name(Keyword keyword) {
  return kEntries[static_cast<size_t>(keyword)].name;
}

void Document::read_keywords(Schema& schema) {
  for (const Value& member : schema.value->members()) {
    budget_.check();
    const auto found = keywords().find(member.key());
    if (found == keywords().end()) {
      warn_of_unknown(schema, member.key());
      continue;
    }
    check_shape(schema, found->second, member);
    schema.keywords[static_cast<size_t>(found->second)] = &member;
  }
  if (const Value* const properties = schema[Keyword::properties]) {
    for (const Value& each : properties->members()) schema.properties.emplace(each.key(), &each);
  }
  if (schema[Keyword::prefix_items] != nullptr && schema.draft() < kDraft2020)
    refuse(schema, Keyword::prefix_items,
           "does not exist in the draft that $schema selects: use items instead");
}

void Document::check_shape(const Schema& schema, Keyword keyword, const Value& value) const {
  bool is_right = true;
  const char* expected = "";
  const auto count = [&] {
    if (value.kind() != Kind::number) return false;
    const Decimal number = Decimal::parse(value.written());
    return !number.is_negative && number.is_integer();
  };
  const Shape shape = shape_of(keyword);
  // If the document does not select a draft, the compiler also accepts the keyword shapes of older
  // drafts.
  const bool may_be_older = !schema.resource->names_draft;
  switch (shape) {
    case Shape::any:
      break;
    case Shape::boolean:
      is_right = value.kind() == Kind::boolean, expected = "true or false";
      break;
    case Shape::text:
      is_right = value.kind() == Kind::string, expected = "a string";
      break;
    case Shape::number:
      expected = "a number";
      is_right = value.kind() == Kind::number ||
                 (value.kind() == Kind::boolean && (may_be_older || schema.draft() == kDraft4) &&
                  (keyword == Keyword::exclusive_minimum || keyword == Keyword::exclusive_maximum));
      break;
    case Shape::positive:
      expected = "a number above 0";
      is_right = value.kind() == Kind::number;
      if (is_right) {
        const Decimal number = Decimal::parse(value.written());
        is_right = !number.is_negative && !number.is_zero();
      }
      break;
    case Shape::count:
      is_right = count(), expected = "a count";
      break;
    case Shape::list:
      is_right = value.kind() == Kind::array, expected = "a list of values";
      break;
    case Shape::names:
      is_right = is_list_of_names(value), expected = "a list of names";
      break;
    case Shape::types:
      expected =
          "a type, or a list of types: array, boolean, integer, null, number, object, string";
      is_right = value.kind() == Kind::array
                     ? !value.elements().empty() &&
                           std::all_of(value.elements().begin(), value.elements().end(), is_type)
                     : is_type(value);
      break;
    case Shape::schema:
      is_right = is_schema(value), expected = "a schema: an object or a boolean";
      break;
    case Shape::schemas:
      is_right = value.kind() == Kind::array && !value.elements().empty();
      expected = "a list of schemas";
      break;
    case Shape::map:
      is_right = value.kind() == Kind::object, expected = "an object of schemas";
      break;
    case Shape::items:
      expected = "a schema: an object or a boolean";
      is_right = is_schema(value) ||
                 (value.kind() == Kind::array && (may_be_older || schema.draft() < kDraft2020));
      break;
    case Shape::names_by_name:
      expected = "an object of lists of names";
      is_right = value.kind() == Kind::object &&
                 std::all_of(value.members().begin(), value.members().end(), is_list_of_names);
      break;
    case Shape::dependencies:
      expected = "an object of schemas and lists of names";
      is_right = value.kind() == Kind::object &&
                 std::all_of(value.members().begin(), value.members().end(), [](const Value& each) {
                   return is_schema(each) || is_list_of_names(each);
                 });
      break;
  }
  if (!is_right)
    throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(*schema.value) + "/" +
                                          std::string(name(keyword)) + ": " + shown(value) +
                                          " is not " + expected);
}

void Document::warn_of_unknown(const Schema& schema, const std::string& keyword) {
  constexpr size_t kLongest = 24;
  if (keyword == "contentEncoding" || keyword == "contentMediaType" || keyword == "contentSchema")
    warn("schema: " + place(*schema.value) + ": keyword '" + keyword +
         "' is ignored: the content of the string is not checked");
  if (annotations().count(keyword) != 0 || keyword.empty() || keyword.size() > kLongest) return;
  if (!std::isalpha(static_cast<unsigned char>(keyword[0])) || keyword.substr(0, 2) == "x-") return;
  size_t best = kLongest;
  const char* meant = "";
  for (const Entry& entry : kEntries) {
    const std::string_view known = entry.name;
    if (known.size() < kShortestWord || entry.shape == Shape::any) continue;
    const size_t found = distance(keyword, known);
    if (found < best || (found == best && known < meant)) best = found, meant = entry.name;
  }
  if (best <= (keyword.size() < 6 ? 1u : 2u))
    warn("schema: " + place(*schema.value) + ": keyword '" + keyword +
         "' is not known and is ignored: did you mean '" + meant + "'?");
}

}  // namespace dlm::compile::schema
