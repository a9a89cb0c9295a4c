// A kernel serves a call if direction, dtype and head dims fit, it has every feature the call asks for, and its shared
// memory fits the device. Of those the smallest tile of head dims wins, then the order of the table. Nothing else may
// enter: batch, lengths and load must not change a row's bits.
#include "api/choose.h"

#include <stdarg.h>
#include <stdio.h>

#include "api/device.h"
#include "api/gpus.h"
#include "api/names.h"
#include "api/registry.h"
#include "api/settings.h"

namespace flash_ext {
namespace {

// Appends to a fixed buffer; what does not fit is cut, the text is always terminated.
class Text {
  public:
    Text(char* buffer, int32_t size) : buffer_(buffer), size_(size) {
        if (size_ > 0) buffer_[0] = '\0';
    }

    void append(const char* format, ...) __attribute__((format(printf, 2, 3))) {
        if (length_ >= size_ - 1) return;
        va_list arguments;
        va_start(arguments, format);
        const int written = vsnprintf(buffer_ + length_, static_cast<size_t>(size_ - length_), format, arguments);
        va_end(arguments);
        if (written > 0) length_ += written;
    }

  private:
    char* buffer_;
    int32_t size_;
    int32_t length_ = 0;
};

// How far a kernel gets in serving a call; the furthest any kernel got is what the refusal speaks of.
enum class Stage { kDirection, kDataType, kHeadDim, kFeatures, kTile, kSharedMemory, kServes };

Stage stage_of(const RegistryEntry& entry, const KernelQuery& query, const DeviceInfo& device) {
    const KernelInfo& kernel = *entry.kernel;
    if (kernel.direction != query.direction) return Stage::kDirection;
    if (kernel.dtype != query.dtype) return Stage::kDataType;
    if (kernel.head_dim < query.head_dim || kernel.head_dim_v < query.head_dim_v) return Stage::kHeadDim;
    if ((query.features & ~kernel.features) != 0) return Stage::kFeatures;
    if (settings().block_m != 0) {
        // A forced tile overrides `when`, which says what is faster, not what works.
        if (kernel.block_m != settings().block_m || kernel.block_n != settings().block_n) return Stage::kTile;
    } else if (entry.when != When::kAlways) {
        const bool masked = (query.features & (kFeatureCausal | kFeatureWindow)) != 0;
        if ((entry.when == When::kMasked) != masked) return Stage::kTile;
    }
    if (kernel.shared_memory > device.shared_memory_optin) return Stage::kSharedMemory;
    return Stage::kServes;
}

int32_t count_bits(uint32_t value) {
    return __builtin_popcount(value);
}

// Names the arguments behind a set of features: "softcap and dropout_p".
void append_features(Text& text, uint32_t features) {
    int32_t left = count_bits(features);
    for (const FeatureName& entry : kFeatureNames) {
        if ((features & entry.feature) == 0) continue;
        --left;
        text.append("%s%s", entry.argument, left > 1 ? ", " : left == 1 ? " and " : "");
    }
}

// One sentence on why no kernel got beyond `furthest`.
void explain(Text& text, const KernelQuery& query, const DeviceInfo& device, Stage furthest) {
    const char* direction = direction_name(query.direction);
    const char* dtype = data_type_name(query.dtype);
    switch (furthest) {
        case Stage::kDirection:
            text.append("this build of path %s has no %s kernel", FLASH_EXT_PATH_NAME, direction);
            return;
        case Stage::kDataType: {
            text.append("path %s has no %s kernel for %s; it has", FLASH_EXT_PATH_NAME, direction, dtype);
            const char* separator = " ";
            for (const DataTypeName& entry : kDataTypeNames) {
                for (int32_t i = 0; i < kRegistryCount; ++i) {
                    const KernelInfo& kernel = *kRegistry[i].kernel;
                    if (kernel.direction != query.direction || kernel.dtype != entry.dtype) continue;
                    text.append("%s%s", separator, entry.name);
                    separator = ", ";
                    break;
                }
            }
            return;
        }
        default:
            break;
    }

    // What the kernels that got exactly this far have in common with the call, and what they lack.
    int32_t head_dim = 0, head_dim_v = 0;  // of the widest tile
    uint32_t missing = query.features;     // of the kernel that lacks fewest features
    int64_t shared_memory = INT64_MAX;     // of the kernel that needs least
    for (int32_t i = 0; i < kRegistryCount; ++i) {
        const KernelInfo& kernel = *kRegistry[i].kernel;
        if (stage_of(kRegistry[i], query, device) != furthest) continue;
        if (kernel.head_dim + kernel.head_dim_v > head_dim + head_dim_v) {
            head_dim = kernel.head_dim;
            head_dim_v = kernel.head_dim_v;
        }
        const uint32_t lacks = query.features & ~kernel.features;
        if (count_bits(lacks) < count_bits(missing)) missing = lacks;
        if (kernel.shared_memory < shared_memory) shared_memory = kernel.shared_memory;
    }
    switch (furthest) {
        case Stage::kHeadDim:
            text.append("path %s has no %s kernel for %s with head_dim=%d, head_dim_v=%d; its widest holds %d and %d",
                        FLASH_EXT_PATH_NAME, direction, dtype, query.head_dim, query.head_dim_v, head_dim, head_dim_v);
            return;
        case Stage::kFeatures:
            append_features(text, missing);
            text.append(" with %s, head_dim=%d and head_dim_v=%d has no %s kernel on path %s", dtype, query.head_dim,
                        query.head_dim_v, direction, FLASH_EXT_PATH_NAME);
            return;
        case Stage::kTile:
            if (settings().block_m != 0) {
                text.append(
                    "FLASH_EXT_TILE=%dx%d is no tile of path %s's %s kernels for %s with head_dim=%d, head_dim_v=%d",
                    settings().block_m, settings().block_n, FLASH_EXT_PATH_NAME, direction, dtype, query.head_dim,
                    query.head_dim_v);
            } else {
                const bool masked = (query.features & (kFeatureCausal | kFeatureWindow)) != 0;
                text.append("path %s has no %s tile for %s calls of %s with head_dim=%d, head_dim_v=%d",
                            FLASH_EXT_PATH_NAME, direction, masked ? "masked" : "unmasked", dtype, query.head_dim,
                            query.head_dim_v);
            }
            return;
        case Stage::kSharedMemory:
            text.append(
                "path %s's %s kernel for %s with head_dim=%d, head_dim_v=%d needs %lld bytes of shared memory per CTA; "
                "%s offers %d",
                FLASH_EXT_PATH_NAME, direction, dtype, query.head_dim, query.head_dim_v,
                static_cast<long long>(shared_memory), device.name, device.shared_memory_optin);
            return;
        default:
            return;
    }
}

}  // namespace

int32_t choose(const KernelQuery& query, char* reason, int32_t reason_size) {
    Text text(reason, reason_size);
    DeviceInfo device;
    if (const int32_t error = device_info(query.device, &device); error != 0) {
        text.append("device %d cannot be used: %s (%s)", query.device, flash_ext_error_name(error),
                    flash_ext_error_string(error));
        return -1;
    }
    if (!path_serves(FLASH_EXT_PATH_NAME, device.compute_capability_major, device.compute_capability_minor)) {
        text.append("path %s serves GPUs of compute capability %s; %s has %d.%d", FLASH_EXT_PATH_NAME,
                    path_gpus(FLASH_EXT_PATH_NAME), device.name, device.compute_capability_major,
                    device.compute_capability_minor);
        return -1;
    }

    int32_t best = -1, best_size = 0;
    Stage furthest = Stage::kDirection;
    for (int32_t i = 0; i < kRegistryCount; ++i) {
        const Stage stage = stage_of(kRegistry[i], query, device);
        if (stage > furthest) furthest = stage;
        if (stage != Stage::kServes) continue;
        const int32_t size = kRegistry[i].kernel->head_dim + kRegistry[i].kernel->head_dim_v;
        if (best < 0 || size < best_size) {
            best = i;
            best_size = size;
        }
    }
    if (best < 0) explain(text, query, device, furthest);
    return best;
}

}  // namespace flash_ext
