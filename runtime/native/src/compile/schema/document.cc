// Parses the text of a schema. Finds the resources of the document (see Resource), their drafts,
// the subschemas, and the position of each value. keyword_shapes.cc checks the keywords, and
// references.cc resolves the references.
#include "compile/schema/document.h"

#include <optional>

#include "base/error.h"
#include "base/utf8.h"
#include "compile/json/json_text.h"
#include "compile/schema/keyword_shapes.h"
#include "compile/schema/uri.h"

namespace dlm::compile::schema {
namespace {

using json::Value;
using Kind = Value::Kind;

constexpr int kMostSchemaNesting = 256;  // largest nesting depth of the schema's JSON text
constexpr size_t kMostText = 16 << 20;   // largest size of the schema's JSON text, in bytes
// The largest number of bytes of memory that parsed JSON needs per byte of text (see base/json.h).
constexpr size_t kBytesPerByte = 100;
// A message contains at most this many characters of a value.
constexpr size_t kMostShown = 60;

int draft_of(const Value& value, int otherwise, bool* is_named) {
  const Value* const named = value.kind() == Kind::object ? value.find("$schema") : nullptr;
  if (named == nullptr || named->kind() != Kind::string) return otherwise;
  std::string_view uri = named->string();
  while (!uri.empty() && (uri.back() == '#' || uri.back() == '/')) uri.remove_suffix(1);
  const size_t scheme = uri.find("://");
  const std::string_view rest = scheme == std::string_view::npos ? uri : uri.substr(scheme + 3);
  *is_named = true;
  if (rest == "json-schema.org/draft-03/schema")
    fail(DLM_INVALID_ARGUMENT, "schema: $schema %s is not supported: write it for Draft 4 or later",
         json::quoted(named->string()).c_str());
  if (rest == "json-schema.org/draft-04/schema") return kDraft4;
  if (rest == "json-schema.org/draft-06/schema") return kDraft6;
  if (rest == "json-schema.org/draft-07/schema") return kDraft7;
  if (rest == "json-schema.org/draft/2019-09/schema") return kDraft2019;
  if (rest == "json-schema.org/draft/2020-12/schema") return kDraft2020;
  *is_named = false;
  return otherwise;
}

// Appends a value as JSON text. Stops when `out` is longer than a message needs.
void append_shown(const Value& value, std::string& out) {
  if (out.size() > 4 * kMostShown) return;
  switch (value.kind()) {
    case Kind::null:
      out += "null";
      return;
    case Kind::boolean:
      out += value.boolean() ? "true" : "false";
      return;
    case Kind::number:
      out += value.written();
      return;
    case Kind::string:
      out += json_string(value.string());
      return;
    case Kind::array:
    case Kind::object: {
      const bool is_array = value.kind() == Kind::array;
      out += is_array ? '[' : '{';
      bool is_first = true;
      for (const Value& item : is_array ? value.elements() : value.members()) {
        if (out.size() > 4 * kMostShown) return;
        if (!is_first) out += ", ";
        is_first = false;
        if (!is_array) out.append(json_string(item.key())).append(": ");
        append_shown(item, out);
      }
      out += is_array ? ']' : '}';
      return;
    }
  }
}

// Returns the first kMostShown code points of a text. If the text is longer, the result ends with
// "...".
std::string cut(const std::string& text) {
  size_t points = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (continues_char(text[i])) continue;
    if (points++ == kMostShown) return text.substr(0, i) + "...";
  }
  return text;
}

}  // namespace

std::string shown(const Value& value) {
  std::string out;
  append_shown(value, out);
  return cut(out);
}

Document::Document(std::string_view text, Budget& budget) : budget_(budget) {
  budget_.check_memory(text.size() * kBytesPerByte);
  try {
    owned_ = json::parse(text, kMostText, kMostSchemaNesting);
  } catch (const Error& error) {
    throw Error(DLM_INVALID_ARGUMENT, std::string("schema: not JSON: ") + error.what());
  }
  root_ = owned_.get();
  read_root();
}

Document::Document(const Value& root, Budget& budget) : budget_(budget), root_(&root) {
  read_root();
}

void Document::read_root() {
  if (!is_schema(*root_))
    throw Error(DLM_INVALID_ARGUMENT,
                "schema: #: " + shown(*root_) + " is not a schema: give an object or a boolean");
  bool is_named = false;
  const int draft = draft_of(*root_, kDraft2020, &is_named);
  resources_.push_back(std::make_unique<Resource>(Resource{root_, "", draft, is_named, {}, {}}));
  by_uri_.emplace("", resources_[0].get());
  index(*root_, nullptr, resources_[0].get(), true);
}

// Returns the resource of an object. If the object has its own URI because of $id, creates a new
// resource and returns it. Otherwise returns `around`, the resource around the object.
Resource* Document::resource_of(const Value& value, Resource* around) {
  bool is_named = around->names_draft;
  const bool is_root = around->root == &value;
  const int draft = is_root ? around->draft : draft_of(value, around->draft, &is_named);
  const Value* id = value.find(draft == kDraft4 ? "id" : "$id");
  if (draft <= kDraft7 && value.find("$ref") != nullptr) id = nullptr;
  Resource* made = around;
  if (id != nullptr && id->kind() == Kind::string) {
    const std::string& given = id->string();
    std::optional<std::string> fragment;
    const std::string uri = resolved(around->uri, given, fragment);
    if (!given.empty() && given[0] == '#') {
      if (draft <= kDraft7 && fragment.has_value()) around->anchors.emplace(*fragment, &value);
    } else if (is_root) {
      around->uri = uri;
      by_uri_.emplace(uri, around);
    } else {
      resources_.push_back(
          std::make_unique<Resource>(Resource{&value, uri, draft, is_named, {}, {}}));
      made = resources_.back().get();
      by_uri_.emplace(uri, made);
    }
    if (draft <= kDraft7 && fragment.has_value() && !fragment->empty() && given[0] != '#')
      made->anchors.emplace(*fragment, &value);
  }
  if (made == around && !is_root && draft != around->draft)
    throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(value) +
                                          ": keyword '$schema' selects a different draft than the "
                                          "schema around it: add an $id to this schema");
  for (const char* const keyword : {"$anchor", "$dynamicAnchor"}) {
    const Value* const anchor = value.find(keyword);
    if (anchor == nullptr || anchor->kind() != Kind::string) continue;
    made->anchors.emplace(anchor->string(), &value);
    if (keyword[1] == 'd') made->dynamic_anchors.emplace(anchor->string(), &value);
  }
  return made;
}

void Document::index(const Value& value, const Value* parent, Resource* resource,
                     bool is_schema_here) {
  budget_.check();
  const bool is_object = value.kind() == Kind::object;
  if (!is_object && value.kind() != Kind::array && !is_schema_here) return;
  const auto first = static_cast<uint32_t>(references_.size());
  Place& place = places_.emplace(&value, Place{parent, resource, first, first}).first->second;
  if (!is_object && value.kind() != Kind::array) return;
  if (is_object && is_schema_here) place.resource = resource = resource_of(value, resource);
  bool has_reference = false;
  for (const Value& item : is_object ? value.members() : value.elements()) {
    Shape shape = Shape::any;
    if (is_object && is_schema_here) {
      const auto found = keywords().find(item.key());
      if (found != keywords().end()) {
        const Keyword keyword = found->second;
        shape = keyword == Keyword::defs || keyword == Keyword::definitions ? Shape::map
                                                                            : shape_of(keyword);
      }
    }
    if (is_object && !has_reference && item.kind() == Kind::string &&
        (item.key() == "$ref" || item.key() == "$dynamicRef" || item.key() == "$recursiveRef")) {
      references_.push_back(&value);
      has_reference = true;
    }
    const bool is_map =
        (shape == Shape::map || shape == Shape::dependencies) && item.kind() == Kind::object;
    const bool is_list =
        (shape == Shape::schemas || shape == Shape::items) && item.kind() == Kind::array;
    if (is_map || is_list) {
      const auto before = static_cast<uint32_t>(references_.size());
      places_.emplace(&item, Place{&value, resource, before, before});
      for (const Value& each : is_map ? item.members() : item.elements())
        index(each, &item, resource, is_schema(each) || shape != Shape::dependencies);
      places_.at(&item).last = static_cast<uint32_t>(references_.size());
    } else {
      index(item, &value, resource, shape == Shape::schema || shape == Shape::items);
    }
  }
  places_.at(&value).last = static_cast<uint32_t>(references_.size());
}

std::string Document::place(const Value& value) const {
  std::string out;
  const Value* at = &value;
  for (auto found = places_.find(at); found != places_.end(); found = places_.find(at)) {
    const Value* const parent = found->second.parent;
    if (parent == nullptr) break;
    std::string step = "/";
    if (parent->kind() == Kind::array) {
      step += std::to_string(at - parent->elements().data());
    } else {
      for (const char c : at->key()) step += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
    }
    out.insert(0, cut(step));
    if (out.size() > 200) return "#/..." + out.substr(out.find('/', out.size() - 160));
    at = parent;
  }
  return "#" + out;
}

void Document::refuse(const Schema& at, Keyword keyword, const std::string& why) const {
  throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(*at.value) + ": keyword '" +
                                        std::string(name(keyword)) + "' " + why);
}

void Document::warn(const std::string& text) {
  constexpr size_t kMostWarnings = 100;
  if (warnings_.size() < kMostWarnings && warned_.insert(text).second) warnings_.push_back(text);
}

const Schema& Document::schema(const Value& value) {
  std::unique_ptr<Schema>& made = schemas_[&value];
  if (made == nullptr) {
    budget_.check();
    if (!is_schema(value))
      throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(value) + ": " + shown(value) +
                                            " is not a schema: give an object or a boolean");
    const auto found = places_.find(&value);
    const Resource* const resource =
        found == places_.end() ? resources_[0].get() : found->second.resource;
    auto read = std::make_unique<Schema>();
    read->value = &value;
    read->resource = resource;
    if (value.kind() == Kind::object) read_keywords(*read);
    made = std::move(read);
  }
  return *made;
}

}  // namespace dlm::compile::schema
