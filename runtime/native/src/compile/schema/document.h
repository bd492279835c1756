// Parses a JSON Schema. Finds the subschemas and their keywords, and resolves references such as
// {"$ref": "#/$defs/a"}.
//
// The target of a reference must be inside the same document. The code never retrieves other
// documents. `$schema` selects the draft of the specification that defines the keywords. The
// default is Draft 2020-12.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/json.h"
#include "compile/automata/budget.h"

namespace dlm::compile::schema {

enum class Keyword : uint8_t {
  type,
  enum_,
  const_,
  minimum,
  maximum,
  exclusive_minimum,
  exclusive_maximum,
  multiple_of,
  min_length,
  max_length,
  pattern,
  format,
  items,
  prefix_items,
  additional_items,
  min_items,
  max_items,
  unique_items,
  contains,
  min_contains,
  max_contains,
  unevaluated_items,
  properties,
  pattern_properties,
  additional_properties,
  property_names,
  required,
  min_properties,
  max_properties,
  dependent_required,
  dependent_schemas,
  dependencies,
  unevaluated_properties,
  ref,
  dynamic_ref,
  recursive_ref,
  all_of,
  any_of,
  one_of,
  not_,
  if_,
  then_,
  else_,
  schema,
  id,
  draft_4_id,
  anchor,
  dynamic_anchor,
  recursive_anchor,
  defs,
  definitions,
  count
};

constexpr int kDraft4 = 4, kDraft6 = 6, kDraft7 = 7, kDraft2019 = 2019, kDraft2020 = 2020;

// The kinds of JSON values, as a bit mask. kFraction means a number that is not an integer.
enum Kinds : uint8_t {
  kNull = 1,
  kBoolean = 2,
  kInteger = 4,
  kFraction = 8,
  kString = 16,
  kArray = 32,
  kObject = 64,
  kNumber = kInteger | kFraction,
  kAllKinds = 127
};

// A resource is the whole document, or a subschema that has its own $id. The URI in a reference is
// relative to the URI of the resource that contains the reference.
struct Resource {
  const json::Value* root;
  std::string uri;  // the URI of the resource, without a fragment
  int draft;
  bool names_draft;  // true if $schema in this or an outer resource selects the draft
  std::unordered_map<std::string, const json::Value*> anchors, dynamic_anchors;
};

// A subschema. For each keyword, `keywords` contains the keyword's value, or nullptr if the keyword
// is missing. The parser has already checked that each value has the shape that the specification
// requires.
struct Schema {
  const json::Value* value;
  const Resource* resource;
  std::array<const json::Value*, static_cast<size_t>(Keyword::count)> keywords{};
  // Maps the names in the keyword "properties" to their schemas.
  std::unordered_map<std::string_view, const json::Value*> properties;

  const json::Value* operator[](Keyword keyword) const {
    return keywords[static_cast<size_t>(keyword)];
  }
  bool is_boolean() const { return value->kind() == json::Value::Kind::boolean; }
  int draft() const { return resource->draft; }
};

// The parsed text of one JSON Schema, with its subschemas and references.
class Document {
 public:
  // Parses the text of a schema. Throws an Error with status DLM_INVALID_ARGUMENT if the text is
  // not JSON or not a schema.
  Document(std::string_view text, Budget& budget);
  // Uses a schema that is already parsed as JSON. `root` must outlive this object.
  Document(const json::Value& root, Budget& budget);

  const Schema& root() { return schema(*root_); }
  // Returns the subschema for a JSON value of the document. Repeated calls return the same object.
  const Schema& schema(const json::Value& value);
  // Returns the target of a schema's $ref, $dynamicRef or $recursiveRef. Throws an error if the
  // target is outside the document.
  const Schema& target(const Schema& from, Keyword keyword);

  // Returns the position of a value in the document, as a JSON pointer such as "#/properties/a".
  std::string place(const json::Value& value) const;
  // Throws an error with a message such as "schema: #/a: keyword 'x' <why>".
  [[noreturn]] void refuse(const Schema& at, Keyword keyword, const std::string& why) const;
  void warn(const std::string& text);
  const std::vector<std::string>& warnings() const { return warnings_; }

  // Returns the targets of all references inside a value, at any depth. Ignores references without
  // a valid target.
  std::vector<const json::Value*> destinations_below(const json::Value& value);
  static std::string_view name(Keyword keyword);

 private:
  void read_root();
  struct Place {
    const json::Value* parent;
    const Resource* resource;
    // The references inside the array or object are references_[first] to references_[last - 1].
    uint32_t first, last;
  };
  void index(const json::Value& value, const json::Value* parent, Resource* resource,
             bool is_schema);
  Resource* resource_of(const json::Value& value, Resource* around);
  void read_keywords(Schema& schema);
  void check_shape(const Schema& schema, Keyword keyword, const json::Value& value) const;
  void warn_of_unknown(const Schema& schema, const std::string& keyword);
  const json::Value* at_pointer(const Resource& resource, std::string_view pointer) const;
  const json::Value& target_value(const Schema& from, Keyword keyword);
  const std::vector<const json::Value*>& destinations(const json::Value& holder);

  Budget& budget_;
  std::unique_ptr<const json::Value> owned_;
  const json::Value* root_;
  std::vector<std::unique_ptr<Resource>> resources_;
  std::unordered_map<std::string, Resource*> by_uri_;
  // One entry for each array and each object of the document.
  std::unordered_map<const json::Value*, Place> places_;
  // The objects that contain a $ref, $dynamicRef or $recursiveRef.
  std::vector<const json::Value*> references_;
  std::unordered_map<const json::Value*, std::vector<const json::Value*>> destinations_;
  std::unordered_map<const json::Value*, std::unique_ptr<Schema>> schemas_;
  std::vector<std::string> warnings_;
  std::unordered_set<std::string> warned_;
};

// Returns a value as JSON text for messages. Cuts long texts.
std::string shown(const json::Value& value);

}  // namespace dlm::compile::schema
