/* Facts of the layout by number, 0 to `num_facts() - 1`. */

#ifndef PACELINE_LAYOUT_H
#define PACELINE_LAYOUT_H

#include <stdint.h>

int64_t num_facts(void);
const char *fact_name(int64_t index);
int64_t fact_value(int64_t index);

#endif
