// References between URIs (RFC 3986, section 5.2) and JSON pointers (RFC 6901), as text alone:
// nothing is ever retrieved.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dlm::compile::schema {

// The URI that `reference` means in a document of URI `base`, without its fragment; `fragment`
// receives that, with its percent-encoding undone (nullopt for a wrong encoding).
std::string resolved(std::string_view base, std::string_view reference,
                     std::optional<std::string>& fragment);

// The steps of a JSON pointer that starts with "/" or is empty; nullopt if it is not well-formed.
std::optional<std::vector<std::string>> pointer_steps(std::string_view pointer);

}  // namespace dlm::compile::schema
