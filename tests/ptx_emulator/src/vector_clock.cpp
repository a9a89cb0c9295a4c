#include "vector_clock.h"

namespace ptx_emulator {

void Knowledge::join(const Knowledge& other, bool same_cluster, uint32_t other_cluster, uint32_t own_cluster) {
    if (same_cluster) {
        generic.join(other.generic);
        published.join(other.published);
        tensor_released.join(other.tensor_released);
    } else {
        foreign[other_cluster].join(other.generic);
    }
    for (const auto& [cluster, clock] : other.foreign) {
        if (cluster == own_cluster) {
            generic.join(clock);
        } else {
            foreign[cluster].join(clock);
        }
    }
    for (const auto& [cluster, clock] : other.foreign_published) {
        if (cluster != own_cluster) foreign_published[cluster].join(clock);
    }
}

}  // namespace ptx_emulator
