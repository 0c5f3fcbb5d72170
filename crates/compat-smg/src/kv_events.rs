//! Changes of the prefix cache in the contract's messages.

use std::time::SystemTime;

use grpc_api::control::v1 as own;
use grpc_api::control::v1::subscribe_kv_events_response::Change;

use crate::engine::kv_cache_event::Data;
use crate::engine::{
    KvBlock, KvBlocksRemoved, KvBlocksStored, KvCacheCleared, KvCacheEvent, KvEventBatch,
};

/// A change as a batch of one event, or of none where there is nothing to tell.
///
/// A snapshot has no tokens, which are what the gateway knows blocks by: it is told as an empty
/// cache, which fills again as requests come. Blocks with a salt are nobody's at the gateway.
pub(crate) fn batch(message: own::SubscribeKvEventsResponse) -> KvEventBatch {
    let data = match message.change {
        Some(Change::Snapshot(_) | Change::Cleared(_)) => Some(Data::Cleared(KvCacheCleared {})),
        Some(Change::Stored(stored)) if !stored.salted => Some(Data::Stored(self::stored(&stored))),
        Some(Change::Removed(removed)) => {
            let block_hashes = removed.keys.iter().map(|key| hash(key)).collect();
            Some(Data::Removed(KvBlocksRemoved { block_hashes }))
        }
        Some(Change::Stored(_)) | None => None,
    };
    let event = data.map(|data| KvCacheEvent { event_id: message.sequence, data: Some(data) });
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    KvEventBatch {
        sequence_number: message.sequence,
        timestamp: since_1970.as_secs_f64(),
        events: event.into_iter().collect(),
        dp_rank: Some(0),
    }
}

fn stored(stored: &own::KvBlocksStored) -> KvBlocksStored {
    let block_size = stored.block_size as usize;
    let block = |(index, key): (usize, &Vec<u8>)| KvBlock {
        block_hash: hash(key),
        token_ids: stored.token_ids[index * block_size..(index + 1) * block_size].to_vec(),
        block_size: i32::try_from(stored.block_size).unwrap_or(i32::MAX),
    };
    KvBlocksStored {
        blocks: stored.keys.iter().enumerate().map(block).collect(),
        parent_block_hash: (stored.blocks_before > 0).then(|| hash(&stored.parent_key)),
    }
}

/// A key in eight bytes, of which the last ones are taken.
fn hash(key: &[u8]) -> i64 {
    key.last_chunk().copied().map_or(0, i64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(change: Change) -> own::SubscribeKvEventsResponse {
        own::SubscribeKvEventsResponse { sequence: 7, change: Some(change) }
    }

    fn event(change: Change) -> Option<Data> {
        let batch = batch(message(change));
        assert_eq!((batch.sequence_number, batch.dp_rank), (7, Some(0)));
        batch.events.into_iter().next().and_then(|event| event.data)
    }

    fn key(last: u8) -> Vec<u8> {
        [vec![9; 31], vec![last]].concat()
    }

    #[test]
    fn blocks_have_their_tokens_and_the_hash_of_the_one_before() {
        let of = |blocks_before, salted| own::KvBlocksStored {
            parent_key: key(1),
            blocks_before,
            keys: vec![key(2), key(3)],
            token_ids: vec![10, 11, 12, 13, 14],
            block_size: 2,
            lookahead: 1,
            salted,
        };
        let hash_of = |last: u8| 0x0909_0909_0909_0900 + i64::from(last);
        let block =
            |last, token_ids| KvBlock { block_hash: hash_of(last), token_ids, block_size: 2 };
        let blocks = vec![block(2, vec![10, 11]), block(3, vec![12, 13])];
        for (blocks_before, parent_block_hash) in [(0, None), (4, Some(hash_of(1)))] {
            let stored = KvBlocksStored { blocks: blocks.clone(), parent_block_hash };
            let told = event(Change::Stored(of(blocks_before, false)));
            assert_eq!(told, Some(Data::Stored(stored)));
        }
        assert_eq!(event(Change::Stored(of(0, true))), None);
        let removed = event(Change::Removed(own::KvBlocksRemoved { keys: vec![key(3)] }));
        assert_eq!(
            removed,
            Some(Data::Removed(KvBlocksRemoved { block_hashes: vec![hash_of(3)] }))
        );
    }

    #[test]
    fn a_snapshot_begins_with_nothing() {
        let cleared = Some(Data::Cleared(KvCacheCleared {}));
        assert_eq!(event(Change::Snapshot(own::KvSnapshot::default())), cleared);
        assert_eq!(event(Change::Cleared(own::KvCacheCleared {})), cleared);
    }
}
