// Saves and loads prompt caches (cache/prompt_cache.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "api/handles.h"

namespace dlm {

// Computes the keys and values of a prompt, and writes the whole pages of them to the file `path`.
// Returns the number of tokens in these pages. Calls before_pass before each pass. Throws an Error
// with status DLM_INVALID_ARGUMENT or DLM_UNSUPPORTED.
size_t save_prompt_cache(dlm_bundle& bundle, const int32_t* tokens, size_t count, const char* path,
                         const std::function<void()>& before_pass);

}  // namespace dlm
