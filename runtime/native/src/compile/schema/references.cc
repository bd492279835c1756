// Resolves the references of a schema: $ref, $dynamicRef and $recursiveRef.
#include <algorithm>
#include <optional>
#include <string>

#include "base/error.h"
#include "compile/schema/document.h"
#include "compile/schema/keyword_shapes.h"
#include "compile/schema/uri.h"

namespace dlm::compile::schema {

using json::Value;
using Kind = Value::Kind;

const std::vector<const Value*>& Document::destinations(const Value& holder) {
  const auto [at, is_new] = destinations_.try_emplace(&holder);
  if (!is_new) return at->second;
  Schema from{&holder, places_.at(&holder).resource, {}, {}};
  for (const Keyword keyword : {Keyword::ref, Keyword::dynamic_ref, Keyword::recursive_ref}) {
    const Value* const reference = holder.find(name(keyword));
    if (reference == nullptr || reference->kind() != Kind::string) continue;
    from.keywords[static_cast<size_t>(keyword)] = reference;
    try {
      at->second.push_back(&target_value(from, keyword));
    } catch (const Error&) {
      // This code accepts a missing target, because the reference may be in a schema that is never
      // used.
    }
  }
  return at->second;
}

std::vector<const Value*> Document::destinations_below(const Value& value) {
  std::vector<const Value*> found;
  const auto place = places_.find(&value);
  if (place == places_.end()) return found;
  for (uint32_t i = place->second.first; i < place->second.last; ++i) {
    budget_.check();
    const std::vector<const Value*>& some = destinations(*references_[i]);
    found.insert(found.end(), some.begin(), some.end());
  }
  return found;
}

const Value* Document::at_pointer(const Resource& resource, std::string_view pointer) const {
  const auto steps = pointer_steps(pointer);
  if (!steps.has_value()) return nullptr;
  const Value* at = resource.root;
  for (const std::string& step : *steps) {
    budget_.check();
    if (at->kind() == Kind::object) {
      at = at->find(step);
    } else if (at->kind() == Kind::array) {
      if (step.empty() || step.size() > 9 || (step[0] == '0' && step.size() > 1) ||
          !std::all_of(step.begin(), step.end(), [](char c) { return c >= '0' && c <= '9'; }))
        return nullptr;
      const size_t number = std::stoul(step);
      at = number < at->elements().size() ? &at->elements()[number] : nullptr;
    } else {
      return nullptr;
    }
    if (at == nullptr) return nullptr;
  }
  return at;
}

const Schema& Document::target(const Schema& from, Keyword keyword) {
  const Value& found = target_value(from, keyword);
  if (!is_schema(found))
    throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(*from.value) + ": " +
                                          std::string(name(keyword)) + " " + shown(*from[keyword]) +
                                          " leads to something that is not a schema");
  return schema(found);
}

const Value& Document::target_value(const Schema& from, Keyword keyword) {
  const Value& reference = *from[keyword];
  const auto refuse_it = [&](const char* why) {
    throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(*from.value) + ": " +
                                          std::string(name(keyword)) + " " + shown(reference) +
                                          " " + why);
  };
  std::optional<std::string> fragment;
  const std::string uri = resolved(from.resource->uri, reference.string(), fragment);
  const auto resource = by_uri_.find(uri);
  if (resource == by_uri_.end())
    refuse_it(
        "is not in this schema, and other documents are never retrieved: copy the target into "
        "$defs");
  const Value* found = nullptr;
  const bool is_pointer = fragment.has_value() && (fragment->empty() || (*fragment)[0] == '/');
  if (is_pointer) {
    found = at_pointer(*resource->second, *fragment);
  } else if (fragment.has_value()) {
    const auto anchor = resource->second->anchors.find(*fragment);
    if (anchor != resource->second->anchors.end()) found = anchor->second;
  }
  if (found == nullptr) refuse_it("leads nowhere");
  if (keyword == Keyword::ref) return *found;

  // The target of a dynamic reference depends on the path by which a validator reaches the
  // reference. The path goes through resources, which are the parts of the document that have their
  // own $id. The target is the anchor in the outermost resource on the path that contains an anchor
  // with this name. Every path starts at the root of the document, so if the root contains the
  // anchor, the target is known. If the root lacks the anchor, but several other resources contain
  // it, the target is unknown. In this case, the compiler rejects the reference.
  std::vector<const Value*> same;
  if (keyword == Keyword::dynamic_ref) {
    const auto anchor = is_pointer ? resource->second->dynamic_anchors.end()
                                   : resource->second->dynamic_anchors.find(*fragment);
    if (anchor == resource->second->dynamic_anchors.end() || anchor->second != found) return *found;
    for (const auto& each : resources_) {
      const auto other = each->dynamic_anchors.find(*fragment);
      if (other == each->dynamic_anchors.end()) continue;
      if (each == resources_[0]) return *other->second;
      same.push_back(other->second);
    }
  } else {
    const auto is_anchor = [](const Value& value) {
      const Value* const anchor =
          value.kind() == Kind::object ? value.find("$recursiveAnchor") : nullptr;
      return anchor != nullptr && anchor->kind() == Kind::boolean && anchor->boolean();
    };
    if (!is_anchor(*found)) return *found;
    if (is_anchor(*root_)) return *root_;
    for (const auto& each : resources_)
      if (is_anchor(*each->root)) same.push_back(each->root);
  }
  if (same.size() > 1)
    refuse(from, keyword,
           "leads to different schemas, depending on the path to it: select one of them with $ref");
  return *found;
}

}  // namespace dlm::compile::schema
